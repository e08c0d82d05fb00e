"""How a notebook says what it found, so that the report can put it on its first page."""

FINDING, HEADLINE = "ropelab/finding", "ropelab/headline"


def finding(text: str, *, headline: bool = False) -> None:
    """Show ``text`` (markdown, formulas in dollars) as a finding of the running notebook.

    The marks are in the output's metadata: the report collects the marked outputs of every notebook. It tells its story
    by the headlines, each with the figure before it. Numbers in the text belong there by formatting what was computed,
    never by typing.
    """
    from IPython.display import display

    data = {"text/markdown": f"> **Finding.** {text}", "text/plain": text}
    display(data, raw=True, metadata={FINDING: text, HEADLINE: headline})
