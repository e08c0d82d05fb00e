"""Put the JavaScript files of an element together into one module."""

import re
from pathlib import Path

JS = Path(__file__).parent / "js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)


def module(element: str) -> str:
    """The module of an element: the text of ``js/<element>.js`` behind the text of all files that it imports, once.

    One module is needed, because a page from a file cannot import other files, and anywidget takes one module.
    """
    return "".join(_files(f"{element}.js", set()))


def style() -> str:
    """The style sheet of all elements."""
    return (JS / "knobs.css").read_text()


def _files(name: str, done: set[str]) -> list[str]:
    """The texts without imports of the files that ``name`` needs and are not in ``done``, and of ``name`` itself."""
    if name in done:
        return []
    done.add(name)
    text = (JS / name).read_text()
    needed = [part for other in _IMPORT.findall(text) for part in _files(other, done)]
    return [*needed, _IMPORT.sub("", text)]
