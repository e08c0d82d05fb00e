"""Write the report: pages that Sphinx builds with the settings of ``docs/conf.py``, and that need no network.

- `chapters`: an executed notebook as a page, with its findings
- `ledgers`: the claims of each document with their verdicts
- `provenance`: when and where each record was measured
- `measured`: the times of a run beside the committed ones
- `pages`: the first page, and the pages about all chapters, claims and records
- `mathml`: formulas as MathML
- `small`: figures and pages in fewer bytes
- `report`: all pages together
- `bibliography`: the page of references
- `summary`: the tables of README.md and of the guide
"""
