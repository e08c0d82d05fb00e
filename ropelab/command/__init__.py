"""The command line, in a process that never imports torch: it starts another one for the code under test.

- `cli`: the commands and their options; `vocabulary` has the names that options take.
- `apart`: what a task in the other process found. `process` runs it, and `guard` ends it.
- `summary`, `markdown`: a report in words. `destination`: a file for a report.
"""
