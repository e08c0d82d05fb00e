"""Mark the findings of a notebook, so that the report can put them on its first page."""

FINDING, HEADLINE = "ropelab/finding", "ropelab/headline"


def finding(text: str, *, headline: bool = False) -> None:
    """Show ``text`` (markdown, formulas in dollars) as a finding of the running notebook.

    The marks are in the output's metadata. The report collects the marked outputs of every notebook, and tells its
    story by the headlines, each with the figure before it. Format the numbers in the text from computed values; never
    type them.
    """
    from IPython.display import display

    data = {"text/markdown": f"> **Finding.** {text}", "text/plain": text}
    display(data, raw=True, metadata={FINDING: text, HEADLINE: headline})
