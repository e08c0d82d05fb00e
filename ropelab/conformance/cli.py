"""The command line: ``ropelab verify package.module:function --convention flash_attn``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.declared import DTYPES, declare
from ropelab.conformance.destination import Destination
from ropelab.conformance.laws import LAWS
from ropelab.conformance.process import Outcome, hold_apart
from ropelab.conformance.report import why_not_judged

app = typer.Typer(
    help="The laws of rotary position embedding, held against any implementation.",
    no_args_is_help=True,
    add_completion=False,
)

EXIT_CODES = {"right": 0, "wrong": 1, "not judged": 2}
COLOURS = {"right": "bold green", "wrong": "bold red", "not judged": "bold yellow"}
STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "not applicable": "dim"}


@app.callback()
def main() -> None:
    """The laws of rotary position embedding, held against any implementation."""


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="package.module:function")],
    convention: Annotated[str, typer.Option(help=f"How it is called: {', '.join(CONVENTIONS)}.")],
    layout: Annotated[str | None, typer.Option(help="split_half or interleaved.")] = None,
    out_layout: Annotated[str | None, typer.Option(help="Of the result, if another one.")] = None,
    seq_format: Annotated[str | None, typer.Option(help="Order of the axes: bshd, sbhd or bhsd.")] = None,
    sign: Annotated[str, typer.Option(help="standard, or reversed: declared to turn by minus the angle.")] = "standard",
    maths: Annotated[str | None, typer.Option(help="narrow: in the inputs' dtype; wide: float32 or wider.")] = None,
    columns: Annotated[str | None, typer.Option(help="Layout of full-width tables, if not the features'.")] = None,
    inplace: Annotated[bool, typer.Option("--inplace", help="Declared to overwrite its inputs.")] = False,
    once: Annotated[bool, typer.Option("--once-differentiable", help="No second derivatives claimed.")] = False,
    rotary_dim: Annotated[int | None, typer.Option(help="Features that rotate.")] = None,
    head_dim: Annotated[int, typer.Option(help="Features of a head.")] = 16,
    q_heads: Annotated[int, typer.Option(help="Heads of q.")] = 4,
    k_heads: Annotated[int, typer.Option(help="Heads of k.")] = 2,
    base: Annotated[float, typer.Option(help="Of the frequencies.")] = 10000.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of most cases: {', '.join(DTYPES)}.")] = "float32",
    law: Annotated[list[str] | None, typer.Option(help="Check this law only; can be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this law out; can be repeated.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run: import, laws, diagnosis.")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write the report here as well.")] = None,
) -> None:
    """Check a function law by law, in a process of its own.

    Exit code 0, right: all laws that apply hold, and results were compared with the definition. 1, wrong: a law does
    not hold. 2, not judged: wrong usage, a function that cannot be imported, a device or file that cannot be used, no
    comparison with the definition (the function takes nothing that the laws ask, or no law that compares was chosen),
    or a run that was not completed, as the function ended the process or the time limit was reached. A law that was
    found broken before such an end is proof: the exit code is 1 then, and the report says how the run ended.

    What the function prints goes to stderr. On a machine without a GPU Triton kernels run with TRITON_INTERPRET=1 in
    the environment.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise typer.BadParameter(f"timeout: expected a number of seconds above 0, got {timeout}")
    if not all(target.partition(":")) or target.startswith("."):
        raise typer.BadParameter(f"target: expected package.module:function, got {target!r}")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype: expected one of {tuple(DTYPES)}, got {dtype!r}")
    declared: dict[str, Any] = {
        "convention": convention, "layout": layout, "out_layout": out_layout, "seq_format": seq_format, "sign": sign,
        "maths": maths, "columns": columns, "inplace": inplace, "once_differentiable": once,
        "rotary_dim": rotary_dim, "head_dim": head_dim, "q_heads": q_heads, "k_heads": k_heads, "base": base,
        "device": device, "laws": law, "skip": skip or [],
    }  # fmt: skip
    try:
        declaration = declare(**declared, dtype=DTYPES[dtype])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = [chosen.name for chosen in declaration.laws]
    unwritable = f"json: expected a file that can be written, got {json}"
    with _or_stop(unwritable):
        destination = None if json is None else Destination(json)
    with destination or nullcontext():
        with _or_stop("the function's process could not be started"):
            outcome = hold_apart(target, {**declared, "dtype": dtype}, names, timeout)
        if destination is not None:
            with _or_stop(unwritable):
                destination.write(outcome.to_json() + "\n")
    with _or_stop("stdout: expected a stream that can be written"):
        try:
            _show(Console(), target, outcome, len(names))
            sys.stdout.flush()
        except OSError:  # Python would try again as it ends, and end with a code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
    raise typer.Exit(EXIT_CODES[outcome.verdict])


@app.command()
def laws() -> None:
    """List the laws."""
    table = Table("law", "statement", box=None)
    for law in LAWS.values():
        table.add_row(law.name, law.statement + ("" if law.by_default else " (only if named)"))
    Console().print(table)


@contextmanager
def _or_stop(reason: str) -> Iterator[None]:
    """What the system refuses ends with one line and the exit code that is no verdict."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path or a character that cannot be written
        typer.echo(f"Error: {reason} ({error})", err=True)
        raise typer.Exit(2) from None


def _show(console: Console, target: str, outcome: Outcome, asked: int) -> None:
    if outcome.results:
        console.print(_table(outcome))
    seconds = sum(result["seconds"] for result in outcome.results.values())
    said = f"\n{target}: {_verdict(outcome, asked)} ({seconds:.1f} s)"
    console.print(Text(said, COLOURS[outcome.verdict]), soft_wrap=True)
    if outcome.failed:
        parts = [outcome.results[law]["words"] for law in outcome.failed]
        parts.append(outcome.diagnosis_words or f"Diagnosis: none, as {outcome.stopped}.")
        console.print(Text("\n" + "\n\n".join(parts)), soft_wrap=True)


def _table(outcome: Outcome) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("law", no_wrap=True)
    table.add_column("", no_wrap=True)
    for header in ("error", "allowed"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for law, result in outcome.results.items():
        found, status = result["counterexample"], result["status"]
        numbers: tuple[str, ...] = ("", "")
        if status == "pass" or found is not None:
            numbers = (f"{float(result['violation']):.2g}", f"{float(result['bound']):.2g}")
        remark = found["what"] if found is not None else result["message"]
        table.add_row(law, Text(status, STYLES[status]), *numbers, Text(remark, "dim"))
    return table


def _verdict(outcome: Outcome, asked: int) -> str:
    """In words; ``asked`` is the number of laws that were to be held."""
    if outcome.refused:
        return f"not judged: {outcome.refused}"
    broken = f"{len(outcome.failed)} law{' does' if len(outcome.failed) == 1 else 's do'} not hold"
    if outcome.stopped:
        done = f"{outcome.stopped}; {len(outcome.results)} of {asked} laws were held"
        return f"{broken}; {done}" if outcome.failed else f"not judged: {done}"
    if outcome.verdict == "not judged":
        why = why_not_judged(list(outcome.results.values()))
        return f"not judged: nothing was compared with the definition: {why}"
    if outcome.verdict == "wrong":
        return broken
    every = sum(law.by_default for law in LAWS.values())
    return "all laws that apply hold" + (f", of the {asked} asked for" if asked < every else "")
