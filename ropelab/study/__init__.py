"""The study: claims and verdicts, figures, notebooks and the report.

`engine` judges the claims and runs the notebooks. `site` writes the report.
"""
