"""Write the page of references: the papers of ``data/bibliography.toml``, and the code of ``data/peers.toml``."""

import tomllib
from collections.abc import Mapping

from ropelab.bench.records import ROOT

PAPERS = ROOT / "data" / "bibliography.toml"
CODE = ROOT / "data" / "peers.toml"


def papers() -> Mapping[str, Mapping[str, str]]:
    """The key of each paper, such as ``"su-2021"`` -> authors, title, where, url."""
    return tomllib.loads(PAPERS.read_text(encoding="utf-8"))


def markdown() -> str:
    """A heading for each paper, to which chapters link, and a list of the packages and commits that the book runs."""
    parts = []
    for key, paper in papers().items():
        words = f"{paper['authors']}. [{paper['title']}]({paper['url']}). {paper['where']}."
        parts.append(f"### {key.replace('-', ' ').title()}\n\n{words}\n")
    code = tomllib.loads(CODE.read_text(encoding="utf-8"))
    releases = {f"- {one['name']} {one['version']}" for one in [*code["package"], *code["library"]]}
    commits = {
        f"- [{one['repository']} at {one['commit'][:12]}](https://github.com/{one['repository']}/tree/{one['commit']})"
        for one in code["commit"]
    }
    return "\n".join([*parts, "## Code\n", *sorted(releases | commits, key=str.lower), ""])
