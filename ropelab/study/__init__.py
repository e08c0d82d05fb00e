"""The study: claims and their verdicts, figures, the notebook runner and the report."""
