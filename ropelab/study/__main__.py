"""The study's commands, as ``python -m ropelab.study``; the Makefile calls them."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ropelab.bench.records import MEASUREMENTS
from ropelab.study import runner

app = typer.Typer(help="Measure, run the notebooks, draw, report.", no_args_is_help=True, add_completion=False)
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny parameters: does everything run?")]


@app.callback()
def main(
    context: typer.Context,
    build: Annotated[Path, typer.Option(help="Where everything generated goes.")] = Path("build"),
) -> None:
    context.obj = build


@app.command()
def reproduce(context: typer.Context, smoke: Smoke = False) -> None:
    """Measure if there is a GPU, run every notebook, write the report."""
    from ropelab.study import report

    build: Path = context.obj
    notebooks = runner.sources()
    gpu = torch.cuda.is_available()
    steps = len(notebooks) + gpu + 1
    numbers = iter(range(1, steps + 1))
    failed = False

    def announce(what: str, end: str = " ") -> float:
        print(f"[{next(numbers)}/{steps}] {what:24}", end=end, flush=True)
        return time.monotonic()

    if gpu:
        started = announce("measure", end="\n")
        try:
            take_measurements(build / "measurements" if smoke else MEASUREMENTS, smoke)
        except RuntimeError as error:  # the report shows what was measured, now or before
            print(f"  {error}")
            failed = True
        print(f"{'':30} {time.monotonic() - started:6.1f} s", flush=True)
    else:
        print("no GPU: Triton's interpreter runs the kernels, and times come from the committed records")

    runs = []
    for notebook in notebooks:
        announce(notebook.stem)
        wanted = runner.declared_parameters(notebook)
        runs.append(runner.run_notebook(notebook, build, {"smoke": smoke} if "smoke" in wanted else {}))
        failure = runs[-1].failure
        print(f"{runs[-1].seconds:6.1f} s" + (f"  FAILED in {failure}" if failure else ""), flush=True)

    started = announce("report")
    page = build / "report" / "index.html"
    problems = report.write(page, runs, smoke=smoke)
    print(f"{time.monotonic() - started:6.1f} s  {page}")
    for problem in problems:
        print(f"  {problem}")
    if any(run.failure for run in runs):
        print(f"a notebook failed; what it printed is in {build / 'logs'}")
        failed = True
    if failed:
        raise typer.Exit(1)


@app.command()
def measure(
    studies: Annotated[list[str] | None, typer.Argument(help="By default all but the sweep of tiles.")] = None,
    smoke: Smoke = False,
) -> None:
    """Measure on this GPU and replace its records."""
    if not torch.cuda.is_available():
        sys.exit(f"measuring needs a CUDA GPU, and torch {torch.__version__} sees none on this machine")
    take_measurements(MEASUREMENTS, smoke, studies)


@app.command()
def figures(context: typer.Context) -> None:
    """Redraw the figures from the committed records."""
    from ropelab.study.figures import draw_all

    directory = context.obj / "figures"
    files, missing = draw_all(directory)
    for reason in missing:
        print(f"  {reason}")
    if not files:
        sys.exit("no figure could be drawn")
    print(f"figures are in {directory}")


@app.command()
def lab(context: typer.Context) -> None:
    """Open the notebooks in JupyterLab."""
    with runner.own_kernel(context.obj):
        os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", f"--notebook-dir={runner.NOTEBOOKS}"])


def take_measurements(directory: Path, smoke: bool, only: list[str] | None = None) -> None:
    from ropelab.study.measure import measure

    measure(directory, smoke=smoke, only=only)


if __name__ == "__main__":
    app()
