"""Execute the notebooks with papermill, in this interpreter and with checked parameters.

No failure is hidden.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from traitlets.config import Config

from ropelab.bench import whole_file
from ropelab.bench.packages import PEERS
from ropelab.bench.record_checks import sha256
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.workers import cores
from ropelab.study.engine import unfinished

ROOT = Path(__file__).parents[3]
NOTEBOOKS = ROOT / "notebooks"
FIGURE_FORMATS = {"svg"}
"""The form in which a notebook keeps a figure: lines and letters, which take fewer bytes than pixels."""


@dataclass(frozen=True)
class Failure:
    """Where and how a notebook stopped; ``cell`` counts the source notebook's cells from 1."""

    cell: int
    error: str

    def __str__(self) -> str:
        return f"cell {self.cell}: {self.error}"


@dataclass(frozen=True)
class Run:
    """One executed notebook: its name, the executed (perhaps partial) file, and its failure, if any."""

    name: str
    path: Path
    seconds: float
    failure: Failure | None = None


def sources(directory: Path = NOTEBOOKS) -> list[Path]:
    """The study's notebooks, ``NN_name.ipynb``, in the order of their numbers."""
    return sorted(path for path in directory.glob("*.ipynb") if re.match(r"\d\d_", path.name))


def declared_parameters(notebook: Path) -> dict[str, str]:
    """The names that the notebook's ``parameters`` cell declares, and the type of each."""
    return {name: about["inferred_type_name"] for name, about in papermill.inspect_notebook(notebook).items()}


def check_parameters(notebook: Path, parameters: Mapping[str, object]) -> None:
    """Raise unless the notebook declares these parameters, with these types.

    Raises:
        ValueError: the notebook does not declare a parameter (papermill itself would only warn).
        TypeError: a value has another type; an int is a float too, and a bool is no int.
    """
    declared = declared_parameters(notebook)
    if unknown := sorted(parameters.keys() - declared.keys()):
        raise ValueError(
            f"{notebook.name} has no parameter {', '.join(unknown)}; it declares {', '.join(sorted(declared))}"
        )
    for name, value in parameters.items():
        got = type(value).__name__
        if declared[name] not in (got, "None") and (declared[name], got) != ("float", "int"):
            raise TypeError(f"{notebook.name}: {name}: expected {declared[name]}, got {value!r}")


def kernel_environment(threads: int | None = None) -> dict[str, str]:
    """The variables that let a notebook import this checkout. A notebook itself chooses Triton's interpreter.

    Args:
        threads: the threads that torch may use on the CPU; None leaves the number to torch. Notebooks that run side by
            side must share the cores. Otherwise each of them starts a thread for every core, and the threads of small
            operations wait for each other.
    """
    inherited = os.environ.get("PYTHONPATH")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)])}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


@contextmanager
def own_kernel(build: Path, threads: int | None = None) -> Iterator[None]:
    """Make ``python3``, the kernel that the notebooks name, mean this interpreter.

    A kernel of that name that the user has installed may belong to any environment, so ours is written
    under ``build`` and put in front of the others.
    """
    share = (build / "jupyter").resolve()
    spec = get_kernel_dict(extra_arguments=[f"--InlineBackend.figure_formats={FIGURE_FORMATS}", "--log-level=CRITICAL"])
    spec["env"] = kernel_environment(threads)
    whole_file.write(share / "kernels" / "python3" / "kernel.json", json.dumps(spec, indent=1))

    inherited = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(share), inherited] if inherited else [str(share)])
    try:
        yield
    finally:
        if inherited is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = inherited


def own_sockets(folder: str) -> Config:
    """Make a kernel listen at files in ``folder`` instead of ports: two kernels that start at once may choose one port.

    Windows has no such files, so its kernels listen at ports.
    """
    return Config() if os.name == "nt" else Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})


def run_notebook(source: Path, build: Path, parameters: dict | None = None, threads: int | None = None) -> Run:
    """Execute one notebook into ``build/notebooks``, its output streaming to ``build/logs``.

    A cell that fails does not raise: the partial notebook is kept and the Run says which cell it was. The notebook gets
    its name when it is complete. Where it cannot be written, the Run has the path of the source. ``threads`` is as in
    `kernel_environment`.

    Raises:
        ValueError, TypeError: see ``check_parameters``.
    """
    parameters = parameters or {}
    check_parameters(source, parameters)

    target = build / "notebooks" / source.name
    new = target.with_name(f".{source.stem}.new.ipynb")
    log = build / "logs" / f"{source.stem}.log"
    started = time.monotonic()
    error = ""
    try:
        for path in (target, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        with own_kernel(build, threads), TemporaryDirectory(prefix="ropelab-") as sockets, log.open("w") as stream:
            papermill.execute_notebook(
                source,
                new,
                parameters,
                cwd=source.parent,
                progress_bar=False,
                stdout_file=stream,
                stderr_file=stream,
                config=own_sockets(sockets),
            )
    except papermill.PapermillExecutionError as raised:
        error = f"{raised.ename}: {raised.evalue}"
    except Exception as raised:  # a kernel died or never started, or the disk is full, and the other notebooks go on
        error = f"{type(raised).__name__}: {raised}"
    try:
        cell = _source_cell(new)
        new.replace(target)
    except (OSError, ValueError, nbformat.reader.NotJSONError):  # there is no room for the executed notebook
        new.unlink(missing_ok=True)
        cell, target = 0, source
        error = error or f"{new} could not be written"
    return Run(source.stem, target, time.monotonic() - started, Failure(cell, error) if error else None)


def run_notebooks(
    sources: Sequence[Path],
    build: Path,
    parameters: Mapping[str, object],
    *,
    of_one: Mapping[str, Mapping[str, object]] = {},
    together: int = 1,
    tell: Callable[[int], object] = lambda done: None,
) -> Iterator[Run]:
    """Execute notebooks, ``together`` at a time; the iterator yields their runs in the order of ``sources``.

    Nothing in them is timed, so they may run beside each other. Until `unfinished.finish` the next run keeps the
    notebooks that have ended without an error, if code, data and parameters are the same.

    Args:
        parameters: name -> value; each notebook gets the parameters that it declares.
        of_one: name of a notebook -> parameters for it alone, which replace the others.
        tell: called with the number of notebooks that have ended, whenever it has changed.
    """
    wanted = []
    for source in sources:
        given = {**parameters, **of_one.get(source.stem, {})}
        wanted.append({name: given[name] for name in declared_parameters(source) if name in given})
    for source, given in zip(sources, wanted, strict=True):
        check_parameters(source, given)
    threads = max(1, cores() // min(together, len(sources)))
    results = {source.stem: build / "notebooks" / source.name for source in sources}
    state = unfinished.resume(build, **_depends_on(sources, wanted))
    ended = {name: Run(name, result, 0.0) for name, result in results.items() if state.wrote(name, result)}
    each = zip(sources, repeat(build), wanted, repeat(threads))
    jobs = [Job(one[0].stem, run_notebook, one) for one in each if one[0].stem not in ended]
    with closing(side_by_side(jobs, sys.maxsize, most=together)) as runs:
        for name in results:
            while name not in ended:
                tell(len(ended))
                job, run = next(runs)
                if isinstance(run, BaseException):  # its process died, and the other notebooks go on
                    run = Run(job.name, job.arguments[0], 0.0, Failure(0, f"{type(run).__name__}: {run}"))
                if not run.failure:
                    state.keep_file(job.name, results[job.name])
                ended[job.name] = run
            yield ended[name]


def _depends_on(sources: Sequence[Path], parameters: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The facts of which notebooks depend besides the code of the library: sources, parameters, data and packages."""
    folders = {ROOT / "data", *(ROOT / str(each["records"]) for each in parameters if "records" in each)}
    files = [*sources, *sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())]
    content = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    return {"content": content, "parameters": list(parameters), "peers": sorted(path.name for path in PEERS.glob("*"))}


def _source_cell(executed: Path) -> int:
    """The number, among the source's cells, of the last cell that was started."""
    number = last = 0
    for cell in nbformat.read(executed, as_version=4).cells:
        added = {"injected-parameters", "papermill-error-cell-tag"} & set(cell.metadata.get("tags", []))
        number += not added
        if cell.metadata.get("papermill", {}).get("start_time"):
            last = number
    return last
