"""The command line: ``ropelab verify package.module:function --convention flash_attn``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ropelab.conformance import report as words
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.laws import LAWS
from ropelab.conformance.result import Report
from ropelab.conformance.verify import verify as run

app = typer.Typer(
    help="The laws of rotary position embedding, held against any implementation.",
    no_args_is_help=True,
    add_completion=False,
)

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
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
    json: Annotated[Path | None, typer.Option(help="Write the report here as well.")] = None,
) -> None:
    """Check a function law by law. Exit code 0: all laws hold; 1: some do not; 2: wrong usage.

    On a machine without a GPU Triton kernels run with TRITON_INTERPRET=1 in the environment.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {tuple(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    function = _load(target)
    try:
        report = run(
            function, convention, layout=layout, out_layout=out_layout, seq_format=seq_format, sign=sign, maths=maths,
            columns=columns, inplace=inplace, once_differentiable=once, rotary_dim=rotary_dim, head_dim=head_dim,
            q_heads=q_heads, k_heads=k_heads, base=base, device=device, dtype=DTYPES[dtype], laws=law,
            skip=skip or (),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _show(Console(), target, report)
    if json is not None:
        json.write_text(report.to_json() + "\n")
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def laws() -> None:
    """List the laws."""
    table = Table("law", "statement", box=None)
    for law in LAWS.values():
        table.add_row(law.name, law.statement + ("" if law.by_default else " (only if named)"))
    Console().print(table)


def _load(target: str) -> Any:
    """The object that ``module:name`` is; modules of the working directory are found."""
    module_name, _, path = target.partition(":")
    if not path:
        raise typer.BadParameter(f"expected package.module:function, got {target!r}", param_hint="target")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(str(error), param_hint="target") from error
    return found


def _show(console: Console, target: str, report: Report) -> None:
    table = Table(box=None, header_style="dim")
    table.add_column("law", no_wrap=True)
    table.add_column("", no_wrap=True)
    for header in ("error", "allowed"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for result in report.results:
        numbers = ("", "")
        if result.status == "pass" or result.counterexample is not None:
            numbers = (f"{result.violation:.2g}", f"{result.bound:.2g}")
        remark = result.counterexample.what if result.counterexample else result.message
        table.add_row(result.law, Text(result.status, STYLES[result.status]), *numbers, Text(remark, "dim"))
    console.print(table)
    seconds = sum(result.seconds for result in report.results)
    verdict = "all laws that apply hold" if report.passed else f"{len(report.failed)} laws do not hold"
    console.print(Text(f"\n{target}: {verdict} ({seconds:.1f} s)", "bold green" if report.passed else "bold red"))
    if not report.passed:
        console.print(Text("\n" + words.text(report)), soft_wrap=True)
