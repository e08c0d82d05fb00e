"""How a notebook says what it found, so that the report can put it on its first page."""

FINDING = "ropelab/finding"


def finding(text: str) -> None:
    """Show ``text`` (markdown, formulas in dollars) as a finding of the running notebook.

    The mark is in the output's metadata: the report collects the marked outputs of every notebook.
    Numbers in the text belong there by formatting what was computed, never by typing.
    """
    from IPython.display import display

    data = {"text/markdown": f"> **Finding.** {text}", "text/plain": text}
    display(data, raw=True, metadata={FINDING: text})
