"""The study's commands, ``python -m ropelab.study``; the Makefile calls some of them."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer

from ropelab.bench import processes
from ropelab.bench.records import MEASUREMENTS, ROOT, Selection, of_one_gpu
from ropelab.bench.workers import cores
from ropelab.progress import ProgressLine

if TYPE_CHECKING:
    from ropelab.study.engine.measure import Measured

app = typer.Typer(help="Measure, run the notebooks, draw, report.", no_args_is_help=True, add_completion=False)
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny parameters: does everything run?")]
Gpu = Annotated[str, typer.Option(help="Whose records: a folder of data/measurements; by default of the reference.")]

MEASURING = ("ropelab.study.engine.registered", "ropelab.study.engine.tasks", processes.COMPILER)
REPORTING = ("ropelab.study.engine.runner", "ropelab.study.site.ledgers")
"""The modules of what runs in processes of its own."""


def for_generated_files(folder: Path) -> Path:
    """The folder itself, unless somebody's own files may lie there: of this checkout `build` alone is generated."""
    real = folder.resolve()
    generated = real.is_relative_to(ROOT / "build")
    holds_sources = ROOT.is_relative_to(real) or any((real / name).exists() for name in (".git", "pyproject.toml"))
    if holds_sources or ".git" in real.parts or (real.is_relative_to(ROOT) and not generated):
        expected = "expected a folder for generated files, build or one outside the checkout"
        raise typer.BadParameter(f"{expected}, got {folder}")
    there = next(part for part in (real, *real.parents) if part.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"expected a folder that can be written, got {folder}")
    return folder


@app.callback()
def main(
    context: typer.Context,
    build: Annotated[
        Path, typer.Option(help="Where everything generated goes.", file_okay=False, callback=for_generated_files)
    ] = Path("build"),
) -> None:
    processes.end_on_interruption()
    context.obj = build


@app.command()
def reproduce(context: typer.Context, smoke: Smoke = False, gpu: Gpu = "") -> None:
    """Measure if there is a GPU, run every notebook, write the report. Everything goes to the build folder.

    The book shows the times of the GPU at hand, unless ``--gpu`` names another one. Verdicts rest on committed records.
    """
    where, can_measure = chosen(gpu), torch.cuda.is_available()
    # The imports of the server run beside the imports of this process.
    processes.start_server([*MEASURING, *REPORTING] if can_measure else REPORTING)
    from ropelab.study.engine import claims, runner, unfinished
    from ropelab.study.site import ledgers, report

    build: Path = context.obj
    notebooks = runner.sources()
    steps = len(notebooks) + can_measure + 1
    numbers = iter(range(1, steps + 1))
    started = time.monotonic()
    measured = None

    def said(what: str, seconds: float, more: str = "") -> None:
        print(f"[{next(numbers)}/{steps}] {what:24} {seconds:6.1f} s{more}", flush=True)

    if can_measure:
        print("measuring", flush=True)
        measured = take_measurements(build / "measurements", build, smoke, of_the_book=True)
        said("measured", time.monotonic() - started, f"  {measured.directory}")
    else:
        print("no GPU: Triton's interpreter runs the kernels, and times come from the committed records")

    fresh = {}
    if measured and measured.studies and not smoke and not gpu:
        own = measured.over(MEASUREMENTS, build / "records")
        fresh = {"records": os.path.relpath(own.directory, ROOT), "gpu": own.gpu}
    court = {document.key for document in claims.documents()}
    book = dict.fromkeys((path.stem for path in notebooks if path.stem[3:] not in court), fresh)

    runs = []
    line = ProgressLine(sys.stdout)

    def tell(done: int) -> None:
        line.show(f"{done} of {len(notebooks)} notebooks have run; {line.left(done, len(notebooks))}")

    with ledgers.begun(where) as judged:
        options = {"of_one": book, "together": cores(), "tell": tell}
        for run in runner.run_notebooks(notebooks, build, {"smoke": smoke, "gpu": gpu}, **options):
            runs.append(run)
            line.end()
            said(run.name, run.seconds, f"  FAILED in {run.failure}" if run.failure else "")

        began = time.monotonic()
        page = build / "report" / "index.html"
        new = None if smoke else measured
        problems = report.write(page, runs, judged(), smoke=smoke, where=where, measured=new)
    said("report", time.monotonic() - began, f"  {page}")
    for problem in problems:
        print(f"  {problem}")
    print(f"all that, {time.monotonic() - started:.0f} s")
    if not (measured and measured.broken):
        unfinished.finish(build)
    failed = any(run.failure for run in runs)
    if failed:
        print(f"a notebook failed; what it printed is in {build / 'logs'}")
    print(measured or "", end="")
    raise typer.Exit(failed or bool(measured and measured.broken))


@app.command()
def measure(
    context: typer.Context,
    studies: Annotated[list[str] | None, typer.Argument(help="By default all but the wide sweeps.")] = None,
    smoke: Smoke = False,
    every: Annotated[bool, typer.Option("--all", help="The wide sweeps as well.")] = False,
) -> None:
    """Measure on this GPU and replace its committed records; with --smoke, write trial records elsewhere."""
    if every and studies:
        refuse(f"--all: expected no names beside it, got {' '.join(studies)}")
    has_gpu = torch.cuda.is_available()
    if has_gpu and len(studies or ()) != 1:  # one study runs in this process, and nothing should disturb its times
        processes.start_server(MEASURING)
    from ropelab.study.engine import registered

    try:
        registered.named(studies)
    except ValueError as error:
        refuse(str(error))
    if not has_gpu:
        sys.exit(f"measuring needs a CUDA GPU, and torch {torch.__version__} sees none on this machine")
    if every:
        studies = list(registered.all_studies())
    directory = context.obj / "measurements" if smoke else MEASUREMENTS
    measured = take_measurements(directory, context.obj, smoke, only=studies)
    if not measured.broken:
        measured.state.forget()
    print(measured, end="")
    raise typer.Exit(bool(measured.broken))


@app.command()
def lab(
    context: typer.Context,
    options: Annotated[list[str] | None, typer.Argument(help="Options of JupyterLab, as --ip=0.0.0.0.")] = None,
) -> None:
    """Open JupyterLab on the first notebook; links to records work, because the whole checkout is its root.

    Root, the usual user of a container, gets no browser: browsers refuse to run as root.
    """
    from ropelab.study.engine import runner

    first = runner.sources()[0].relative_to(runner.ROOT).as_posix()
    own = [f"--ServerApp.root_dir={runner.ROOT}", f"--LabApp.default_url=/lab/tree/{first}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        own += ["--allow-root", "--no-browser"]
    with runner.own_kernel(context.obj):
        os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *own, *(options or [])])


@app.command()
def peers(
    large: Annotated[
        bool | None, typer.Option("--large/--no-large", help="Large libraries, too; by default with an NVIDIA GPU.")
    ] = None,
) -> None:
    """Fetch the published code that the study compares with, and compile its CUDA sources where there is nvcc."""
    from ropelab.bench import compile_peers, fetch_peers

    fetch_peers.fetch_listed(large)
    compile_peers.compile_listed()


@app.command()
def hub(context: typer.Context) -> None:
    """Write the package for the Hugging Face hub from the library's own sources."""
    from ropelab.hub import build

    folder = context.obj / "hub"
    try:
        build.build(folder)
    except ValueError as error:
        refuse(str(error))
    print(f"the package is in {folder}")


@app.command()
def memcheck() -> None:
    """Run every kernel under compute-sanitizer: bounds, races, reads before writes."""
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer, a tool of CUDA, is not on the PATH")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for tool in ("memcheck", "racecheck", "initcheck"):
        run("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, "-m", "tests.gpu.memcheck")


@app.command()
def plugins() -> None:
    """Compare layers of vLLM and SGLang with and without the plugins, on a CPU, where these packages are installed."""
    run(sys.executable, "-m", "pytest", "-rs", "tests/interop/test_serving.py", "tests/interop/test_plugins.py")


def run(*command: str) -> None:
    """Run a program in the checkout, and end with its exit code unless that is 0."""
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise typer.Exit(code)


def take_measurements(directory: Path, build: Path, smoke: bool, **options: Any) -> "Measured":
    from ropelab.study.engine.measure import measure

    return measure(directory, smoke=smoke, build=build, **options)


def chosen(gpu: str) -> Selection:
    """The committed records of a GPU, or else of the GPU of reference."""
    try:
        return of_one_gpu(MEASUREMENTS, gpu)
    except ValueError as error:
        refuse(str(error))


def refuse(reason: str) -> NoReturn:
    """End with the exit code of a wrong usage, and say why."""
    typer.echo(reason, err=True)
    raise typer.Exit(2)


def end_in_one_line_on_a_full_disk() -> None:
    """Run the command. No file has its name before it is whole (`ropelab.bench.whole_file`)."""
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.exit(f"{error}: no half written file has been left")


if __name__ == "__main__":
    end_in_one_line_on_a_full_disk()
