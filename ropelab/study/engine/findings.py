"""Make the findings of a notebook, and mark them, so that the report can put them on its first page."""

from collections.abc import Callable, Mapping, Sequence

from ropelab.bench import records

Sentences = Mapping[str, tuple[Sequence[str], Callable[..., str]]]
"""The name of a sentence -> the records that it needs, and the function of their tables that makes it."""

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


def sentence(sentences: Sentences, name: str, where: records.Where = records.MEASUREMENTS) -> str:
    """The sentence of that name; "" if there is none or a record is missing. A missing column is an error."""
    studies, say = sentences.get(name, ((), str))
    try:
        return say(*(record.frame for record in records.load_together(studies, where)))
    except records.Unusable:
        return ""
