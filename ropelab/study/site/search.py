"""Collect the words of all pages for the search box."""

import json
from collections.abc import Iterable

from bs4 import BeautifulSoup, Tag

LONGEST = 4000
"""The most characters of a section that can be searched."""


Entry = tuple[str, str, str, str]
"""A place that a search can find: its URL (page and id), the title of its page, its own title, and its text."""


def entries(file: str, page: str) -> list[Entry]:
    """The sections of a page, its claims and its records.

    Args:
        file: the page's name, such as ``"index.html"``.
        page: its HTML. Each heading with an id begins a section. A claim, and the rows of a record, are entries too.
    """
    soup = BeautifulSoup(page.replace("<wbr>", ""), "html.parser")
    title = _text(soup.title) if soup.title else file
    found = []
    for part in soup.select(".claim dl, tbody[id]"):
        found.append((f"{file}#{part['id']}", title, part["id"], _text(part.find_parent("details") or part)))
    for folded in soup.select("details, script, style, nav, tbody[id]"):
        folded.decompose()
    for heading in soup.select("h1, h2[id], h3[id], h4[id]"):
        words: list[str] = []
        for element in heading.find_all_next(True):
            if element.name in ("h1", "h2", "h3", "h4"):
                break
            if element.name in ("p", "li", "td", "th", "dt", "dd", "pre", "figure"):
                words.append(_text(element))
        where = f"#{heading['id']}" if heading.get("id") else ""
        found.append((f"{file}{where}", title, _text(heading), " ".join(words)[:LONGEST]))
    return found


def script(found: Iterable[Entry]) -> str:
    """The entries as a script. A page from a file may load a script, but may not read another file."""
    return f"window.studyIndex = {json.dumps(list(found), ensure_ascii=False, separators=(',', ':'))};\n"


def _text(element: Tag) -> str:
    images = " ".join(str(image.get("alt", "")) for image in element.find_all("img"))
    return " ".join(f"{element.get_text(' ')} {images}".split())
