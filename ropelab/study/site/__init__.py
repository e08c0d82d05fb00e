"""Write the report: a small site of static pages that needs no server, no network and no script.

- `mathml`: markdown and formulas as HTML
- `chapters`: an executed notebook as a page, its figures and its findings
- `reference`: the public names of the library as pages, from their docstrings
- `guide`: the pages of the folder ``docs``, in markdown
- `ledgers`: the claims of each document with their verdicts
- `provenance`: when and where each record was measured
- `bibliography`: the page of references
- `search`: the words of every page, for the search box
- `summary`: the tables of README.md and of the guide
- `report`: the first page with the story, the pages about all chapters and claims, and all pages together

``templates`` has the pages' frames. ``assets`` has the style, the script and the font for formulas.
"""
