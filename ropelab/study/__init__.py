"""This room is the study: claims and verdicts, figures, notebooks and the report. `engine` runs it."""
