"""Make the findings of a notebook, and mark them, so that the report can put them on its first page."""

from collections.abc import Mapping, Sequence

FINDING, FURTHER, HEADLINE, KNOWN_BY = (f"ropelab/{name}" for name in ("finding", "further", "headline", "known-by"))

PROVED, EXHAUSTED, TESTED, MEASURED = "proved", "checked exhaustively", "tested", "measured"
WAYS = PROVED, EXHAUSTED, TESTED, MEASURED
"""How a statement is known: by a proof for all cases that it names, which a machine checks; by a trial of every case;
by a trial of some cases within a derived bound; or by a clock or a counter."""


def finding(text: str, *, headline: bool = False, by: str = "") -> None:
    """Show ``text`` (markdown, formulas in dollars) as a finding of the running notebook.

    The marks are in the output's metadata. The report collects the marked outputs of every notebook, and tells its
    story by the headlines, each with the figure before it. Format the numbers in the text from computed values; never
    type them.

    Args:
        by: how the statement is known, one of `WAYS`; the finding says it in brackets.

    Raises:
        ValueError: ``by`` is another word.
    """
    from IPython.display import display

    if by:
        _check(by)
        text = f"{text} ({by})"
    data = {"text/markdown": f"> **Finding.** {text}", "text/plain": text}
    display(data, raw=True, metadata={FINDING: text, HEADLINE: headline, KNOWN_BY: [by] if by else []})


def further(texts: Sequence[str], by: str) -> None:
    """Show more findings, known in one way, in a fold below the one that a section is about.

    Raises:
        ValueError: ``by`` is another word.
    """
    from IPython.display import display

    _check(by)
    found = [f"{text} ({by})" for text in texts]
    told = "".join(f"- {text}\n" for text in found)
    markdown = f"<details><summary>More findings ({len(texts)})</summary>\n\n{told}\n</details>"
    data = {"text/markdown": markdown, "text/plain": told}
    display(data, raw=True, metadata={FURTHER: found, KNOWN_BY: [by] * len(texts)})


def statements(rows: Sequence[str], by: str) -> None:
    """Count the statements of the output before, such as the rows of a table, as known by one of `WAYS`.

    Raises:
        ValueError: ``by`` is another word.
    """
    from IPython.display import display

    _check(by)
    text = f"{by.capitalize()}: {len(rows)} {'statement' if len(rows) == 1 else 'statements'} above."
    display({"text/markdown": f"> **{text}**", "text/plain": text}, raw=True, metadata={KNOWN_BY: [by] * len(rows)})


def counted(notebooks: Mapping[str, Mapping]) -> dict[str, dict[str, int]]:
    """The number of statements of each executed notebook that are known in each way.

    Args:
        notebooks: name -> the notebook in nbformat 4.

    Returns:
        The name of each notebook that makes statements -> each of `WAYS` -> the number.
    """
    found = {}
    for name, notebook in notebooks.items():
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
        words = [by for output in outputs for by in output.get("metadata", {}).get(KNOWN_BY, [])]
        if words:
            found[name] = {way: words.count(way) for way in WAYS}
    return found


def _check(by: str) -> None:
    if by not in WAYS:
        raise ValueError(f"by: expected one of {', '.join(WAYS)}, got {by!r}")
