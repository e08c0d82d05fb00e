"""Write a report as Markdown: the text of an issue, or of a comment on a pull request."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ropelab.command.summary import NOTED, failed, in_words, to_note

FLAGS = {"inplace": "--inplace", "once_differentiable": "--once-differentiable", "norm_last": "--norm-last",
         "norm_across": "--norm-across", "table_free": "--table-free"}  # fmt: skip
DEFAULTS = {"sign": "standard", "head_dim": "16", "q_heads": "4", "k_heads": "2", "base": "10000.0", "device": "cpu",
            "dtype": "float32", "arrays": "torch"}  # fmt: skip
"""The defaults of the options of ``ropelab verify`` that have one."""


def markdown(found: Mapping[str, Any]) -> str:
    """Return a report as Markdown.

    Args:
        found: the report, in the format of ``report.schema.json``.
    """
    return "\n".join(_lines(found)).rstrip()


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    about, results = found["about"], found["results"]
    broken = failed(results)
    held = sum(result["status"] == "pass" for result in results)
    name = f"`{about['function']}`"
    notes = to_note(results)
    if found["verdict"] == "right":
        which = f"{held} laws of rotary position embedding" + (
            f", with {len(notes)} to note" if notes else " that apply"
        )
        yield f"### {name} keeps {'' if notes else 'all '}{which}"
    elif found["verdict"] == "not judged":
        yield f"### {name} was not judged"
    else:
        yield f"### {name} breaks {len(broken)} of {len(broken) + held} laws of rotary position embedding"
    yield ""
    if found["stopped"]:
        yield f"The run ended early: {_plain(found['stopped'])}.\n"
    if broken:
        yield "**Broken laws**, each with its smallest counterexample:\n"
        yield from ("| law | says | expected | actual | allowed | at |", "|---|---|---|---|---|---|")
        yield from map(_row, broken)
        yield ""
    if found.get("screen"):
        yield from ("**What it does:**\n", "```text", in_words(found["screen"]), "```", "")
    if notes:
        yield f"**{NOTED['wrong' if broken else 'right'].replace('Notes', 'Notes**', 1)}:\n"
        yield from (f"- `{law}`: {_plain(said)}" for law, said in notes)
        yield ""
    language, call = ("sh", _command(about)) if ":" in about["function"] else ("python", _call(about))
    yield from ("**To repeat this:**\n", f"```{language}", call, "```", "")
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    yield f"Measured with {versions}. Each bound is derived from the dtype and the declared order of operations."


def _row(result: Mapping[str, Any]) -> str:
    found = result["counterexample"]
    cells = [f"`{result['law']}`", result["statement"]]
    if found is None:
        said = f"{'raised ' if result['status'] == 'error' else ''}{result['message']}"
        cells += ["", said, "", ""]
    else:
        where = ", ".join(f"{axis} {index}" for axis, index in found["where"].items())
        shapes = " and ".join(map(str, found["shapes"]))
        cells += [_number(found["expected"]), _number(found["actual"]), _number(found["bound"])]
        cells += [f"{found['what']}, {where} of {shapes}"]
    return f"| {' | '.join(map(_plain, cells))} |"


def _number(value: float | str) -> str:
    return f"{float(value):.6g}"


def _plain(words: str) -> str:
    """Return words in one line, without characters that Markdown would take for a column or for markup of HTML."""
    for sign, escaped in (("|", "\\|"), ("<", "&lt;"), ("\n", " ")):
        words = words.replace(sign, escaped)
    return words


def _claims(about: Mapping[str, str]) -> dict[str, str]:
    """Return the claims that are no defaults."""
    plain = {name: value.removeprefix("torch.") for name, value in about.items()}
    kept = {name: value for name, value in plain.items() if value not in ("None", "False", DEFAULTS.get(name))}
    return {name: value for name, value in kept.items() if name not in ("function", "laws", "skip")}


def _command(about: Mapping[str, str]) -> str:
    """Return the command that repeats the run."""
    parts = ["ropelab", "verify", about["function"]]
    for name, value in _claims(about).items():
        if name == "token_counts":
            parts += ["--sizes", value.strip("[()]").replace(" ", "")]
            continue
        parts += [FLAGS[name]] if name in FLAGS else [f"--{name.replace('_', '-')}", value]
    return shlex.join(parts)


def _call(about: Mapping[str, str]) -> str:
    """Return the call in Python that repeats the run of a function without a name to import."""
    claims = _claims(about)
    named = [f"{name}={f'torch.{value}' if name == 'dtype' else _literal(value)}" for name, value in claims.items()]
    return f"ropelab.conformance.verify({', '.join((about['function'], *named))})"


def _literal(value: str) -> str:
    """Return a number or a truth value as it is, and other text in quotes."""
    return value if value in ("True", "False") or value.replace(".", "", 1).isdigit() else repr(value)
