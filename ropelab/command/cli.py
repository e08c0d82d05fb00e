"""The command line: ``ropelab verify package.module:function --convention flash_attn``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ropelab.command.apart import ProcessEnd, hold_apart, report_apart
from ropelab.command.destination import Destination
from ropelab.command.load import load
from ropelab.command.process import Limits
from ropelab.command.summary import NOTED, in_words, summary, to_note, why_not_judged
from ropelab.command.vocabulary import CHOICES, CONVENTIONS, FAMILIES, FAMILY, MOST_TOKENS
from ropelab.foreign import did_you_mean
from ropelab.progress import ProgressLine

app = typer.Typer(
    help="Check any implementation of rotary position embedding (RoPE).",
    epilog="ropelab --version prints the versions of ropelab, torch, triton and Python; env prints more.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

EXIT_CODES = {"right": 0, "wrong": 1, "not judged": 2}
COLOURS = {"right": "bold green", "wrong": "bold red", "not judged": "bold yellow"}
CALL, CLAIM, RUN, REPORT = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("The call", "The claims", "The run", "The report")
)
TIMEOUT = Annotated[float, RUN(help="The limit in seconds of the whole run, the import included.")]
MEMORY = Annotated[float, RUN(help="The limit in GiB of the run and its child processes, on Linux.")]
JSON = Annotated[Path | None, REPORT(help="Write the report to this file, as JSON.")]
STYLES = {"pass": "green", "note": "yellow", "fail": "bold red", "error": "bold red", "not applicable": "dim"}


class Judged(SystemExit):
    """The end of a run with a verdict, apart from other ends with the exit code 1."""


@app.callback()
def main() -> None:
    """Check any implementation of rotary position embedding (RoPE)."""


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="package.module:function")],
    convention: Annotated[
        str | None, CALL(help="The calling convention, if the parameters do not tell it; see ropelab conventions.")
    ] = None,
    layout: Annotated[
        str | None, CALL(help="The pairs of features: split_half (GPT-NeoX) or interleaved (GPT-J).")
    ] = None,
    out_layout: Annotated[str | None, CALL(help="The layout of the result, if it is another one.")] = None,
    seq_format: Annotated[str | None, CALL(help="The order of the axes: bshd, sbhd or bhsd.")] = None,
    sign: Annotated[str, CLAIM(help="standard, or reversed: it rotates by minus the angle.")] = "standard",
    maths: Annotated[
        str | None, CLAIM(help="The arithmetic. narrow: in the dtype of q; wide: in float32 or wider.")
    ] = None,
    columns: Annotated[
        str | None, CALL(help="The columns of full-width tables: another layout, pair or repeated.")
    ] = None,
    inplace: Annotated[bool, CALL("--inplace", help="The function overwrites its inputs.")] = False,
    once: Annotated[bool, CLAIM("--once-differentiable", help="It has no second derivatives.")] = False,
    norm_last: Annotated[bool, CLAIM("--norm-last", help="It normalizes after the rotation.")] = False,
    norm_across: Annotated[bool, CLAIM("--norm-across", help="It normalizes all heads of a token together.")] = False,
    table_free: Annotated[bool, CLAIM("--table-free", help="It takes frequencies in place of cos and sin.")] = False,
    rotary_dim: Annotated[int | None, CALL(help="The number of features that rotate.")] = None,
    head_dim: Annotated[int, CALL(help="The number of features of a head.")] = 16,
    q_heads: Annotated[int, CALL(help="The number of heads of q.")] = 4,
    k_heads: Annotated[int, CALL(help="The number of heads of k.")] = 2,
    base: Annotated[float, CALL(help="The base of the frequencies.")] = 10000.0,
    device: Annotated[str, RUN(help="The device: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, RUN(help=f"The dtype of most cases: {', '.join(CHOICES['dtype'])}.")] = "float32",
    law: Annotated[list[str] | None, RUN(help="Check only this law or family; may be repeated.")] = None,
    skip: Annotated[list[str] | None, RUN(help="Leave this law or family out; may be repeated.")] = None,
    sizes: Annotated[str | None, RUN(help="Token counts at which the function changes its path, as 64,10240.")] = None,
    arrays: Annotated[str, CALL(help="The arrays that the function takes: torch, jax or numpy.")] = "torch",
    verbose: Annotated[bool, REPORT("-v", "--verbose", help="Print every law, and every counterexample.")] = False,
    timeout: TIMEOUT = Limits.seconds,
    memory: MEMORY = Limits.gibibytes,
    json: JSON = None,
    markdown: Annotated[Path | None, REPORT(help="Write the report to this file, as the text of an issue.")] = None,
    repro: Annotated[Path | None, REPORT(help="Write the smallest wrong call to this file, as a script.")] = None,
) -> None:
    """Check a RoPE function against the laws of rotary position embedding, in a new process.

    Exit code 0: right. Every law that applies holds, and at least one result was compared with the definition.

    Exit code 1: wrong. A law does not hold; the report shows the smallest call that breaks it.

    Exit code 2: not judged. The usage was wrong; the function, device or file could not be used; no result was compared
    with the definition; or the run ended early, by the function itself or by --timeout or --memory. If a law was
    broken before that, the exit code is 1.

    Exit code 130: you pressed Ctrl-C.

    The command imports and runs your code with your rights and without a sandbox: verify only code that you would run.
    What your code prints goes to stderr. Without a GPU, Triton kernels need TRITON_INTERPRET=1.
    """
    limits = _limits(timeout, memory)
    if not all(target.partition(":")) or target.startswith("."):
        raise typer.BadParameter(f"target: expected package.module:function, got {target!r}")
    if (module := target.partition(":")[0]).endswith(".py"):
        named = f"{module.removesuffix('.py').replace('/', '.')}:{target.partition(':')[2]}"
        raise typer.BadParameter(f"target: expected package.module:function, got {target!r}; did you mean {named!r}?")
    if convention is not None:
        _known("convention", convention, "conventions", CONVENTIONS)
    for name in (*(law or ()), *(skip or ())):
        _known("law", name, "laws", (*FAMILY, *FAMILIES))
    files = {
        name: path for name, path in (("json", json), ("markdown", markdown), ("repro", repro)) if path is not None
    }
    for (one, first), (name, path) in combinations(files.items(), 2):
        if _same_file(first, path):
            raise typer.BadParameter(f"{name}: expected another file than that of --{one}, got {path}")
    declared: dict[str, Any] = {
        "convention": convention, "layout": layout, "out_layout": out_layout, "seq_format": seq_format, "sign": sign,
        "maths": maths, "columns": columns, "inplace": inplace, "once_differentiable": once,
        "norm_last": norm_last, "norm_across": norm_across, "table_free": table_free,
        "rotary_dim": rotary_dim, "head_dim": head_dim, "q_heads": q_heads, "k_heads": k_heads, "base": base,
        "device": device, "dtype": dtype, "laws": law, "skip": skip or [], "arrays": arrays,
    }  # fmt: skip
    for name, values in CHOICES.items():
        if (given := declared[name]) is not None and given not in values:
            raise typer.BadParameter(f"{name}: expected one of {values}, got {given!r}{did_you_mean(given, values)}")
    if sizes is not None:
        declared["token_counts"] = _token_counts(sizes)
    with ExitStack() as reserved:
        write_json = _reserved(reserved, "json", json)
        write_markdown = _reserved(reserved, "markdown", markdown)
        write_repro = _reserved(reserved, "repro", repro)
        line = ProgressLine()

        def tell(begun: str, held: int, asked: int) -> None:
            counted = f"{held} of {asked} laws done, " if asked else ""
            line.show(f"{counted}now {begun}; {line.left(held, asked)}")

        with _or_stop("the function's process could not be started"):
            outcome = hold_apart(target, declared, limits, tell, lambda words: line.say(f"wrong: {words}"))
        line.end()
        write_json(outcome.to_json)
        write_markdown(outcome.to_markdown)
        if outcome.screen is not None and (source := outcome.screen["repro"]):
            write_repro(lambda: source)
    _print(lambda console: _show(console, target, outcome, verbose, convention is None))
    raise Judged(EXIT_CODES[outcome.verdict])


@app.command("verify-model")
def verify_a_model(
    target: Annotated[str, typer.Argument(help="An architecture of Transformers, or package.module:model.")],
    timeout: TIMEOUT = Limits.seconds,
    memory: MEMORY = Limits.gibibytes,
    json: JSON = None,
) -> None:
    """Check the RoPE of a whole model, and the attention around it, in a new process.

    The target is an architecture of Transformers, such as llama, from which the command makes a tiny random model; or
    your own model, or a function without arguments that returns it. The exit codes are those of ``verify``. The model
    runs with your rights and without a sandbox.
    """
    _reports("verify-model", {"target": target}, [target], timeout, memory, json)


@app.command("verify-config")
def verify_a_config(
    config: Annotated[
        list[str], typer.Argument(help="config.json, its folder, package.module:name, or an architecture; or several.")
    ],
    against: Annotated[
        str, typer.Option(help="A module, cache, function or description: package.module:name or file.")
    ],
    layer_type: Annotated[str | None, typer.Option(help="Check only the layers of this type.")] = None,
    timeout: TIMEOUT = Limits.seconds,
    memory: MEMORY = Limits.gibibytes,
    json: JSON = None,
) -> None:
    """Check frequencies, a cos/sin cache, a rotary module or a function against a model's configuration.

    The configuration is one of transformers, or a JSON file with the arguments of vLLM's or SGLang's get_rope
    (head_size, max_position, rope_parameters) or with llama.cpp's names (freq_base, freq_scale, n_rot, rope_freqs).

    The target of --against is a tensor [R/2], a cache [P, R], a pair (cos, sin), a torch.nn.Module, a function of
    positions or of x and positions, a function without arguments that returns one of these, a file .pt, .npy or .npz,
    or a description. A class, or a function of config, is called with the configuration.

    The report names each key that the target ignores, applies twice or exchanges with another. Several configurations
    get a line each. The exit codes are those of ``verify``, and the worst configuration decides.
    """
    request = {"configs": config, "against": against, "layer_type": layer_type}
    _reports("verify-config", request, config, timeout, memory, json)


def _reports(
    task: str, request: dict[str, Any], names: list[str], timeout: float, memory: float, json: Path | None
) -> None:
    """Carry out a task in another process, write and print its reports, and end with the code of the worst verdict."""
    limits = _limits(timeout, memory)
    with ExitStack() as reserved:
        write_json = _reserved(reserved, "json", json)
        line = ProgressLine()
        with _or_stop("the process could not be started"):
            found = report_apart(task, request, limits, lambda begun: line.show(f"now {begun}; {line.left(0, 0)}"))
        line.end()
        reports = {name: one["report"] for name, one in found.items()}
        write_json(lambda: dumps(reports if len(reports) > 1 else reports[names[0]], indent=1))

    def show(console: Console) -> None:
        for one in found.values():
            said = one["line" if len(found) > 1 else "words"]
            console.print(Text(said, COLOURS[one["verdict"]]), soft_wrap=True)

    _print(show)
    verdicts = {one["verdict"] for one in found.values()}
    raise Judged(EXIT_CODES[next(verdict for verdict in ("wrong", "not judged", "right") if verdict in verdicts)])


@app.command()
def env() -> None:
    """Print the GPU, versions, backend and state of the plugins, for bug reports."""
    load()
    from ropelab.command.environment import report

    _print(lambda console: console.print(Text(report()), soft_wrap=True))


@app.command()
def laws() -> None:
    """List all laws by family, with what each states."""
    load()
    from ropelab.conformance import CACHE_LAWS, LAWS

    table = Table("family, law", "statement", box=None)
    for family, names in FAMILIES.items():
        table.add_row(Text(family, "bold"), "")
        for law in (known[name] for name in names.split() for known in (LAWS, CACHE_LAWS) if name in known):
            of = " (operators that write a cache)" if law is CACHE_LAWS.get(law.name) else ""
            table.add_row(f"  {law.name}", law.statement + of + ("" if law.by_default else " (only if named)"))
    _print(lambda console: console.print(table))


@app.command()
def conventions(
    name: Annotated[str | None, typer.Argument(help="The convention to describe, with an example.")] = None,
) -> None:
    """List the calling conventions that verify knows, or describe one with an example."""
    if name is not None:
        _known("name", name, "conventions", CONVENTIONS)
    load()
    from ropelab.conformance import CACHE_CONVENTIONS
    from ropelab.conformance import CONVENTIONS as ROTATIONS
    from ropelab.conformance.declared import example

    known: dict[str, Any] = ROTATIONS | CACHE_CONVENTIONS
    if name is None:
        words = "\n".join(f"{kind.name}\n    {kind.signature}" for kind in known.values())
    else:
        words = f"{known[name].signature}\n\n{inspect.getdoc(known[name])}\n\nFor example:\n{example(name)}"
    _print(lambda console: console.print(Text(words), soft_wrap=True))


def _known(name: str, value: str, command: str, known: Iterable[str]) -> None:
    """Raise BadParameter unless a value is one of those that a command lists."""
    if value not in (known := list(known)):
        near = did_you_mean(value, known)
        expected = f"one of those that `ropelab {command}` lists"
        raise typer.BadParameter(f"{name}: expected {expected}, got {value!r}{near}")


def _token_counts(value: str) -> list[int]:
    """Return the numbers of tokens that commas separate."""
    counts = [int(part) if part.isdecimal() else 0 for part in value.split(",")]
    if not all(1 <= count <= MOST_TOKENS for count in counts):
        raise typer.BadParameter(f"sizes: expected integers from 1 to {MOST_TOKENS} with commas, got {value!r}")
    return counts


def _limits(timeout: float, memory: float) -> Limits:
    try:
        return Limits(timeout, memory)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _same_file(one: Path, other: Path) -> bool:
    """Return whether two paths are one file; devices and pipes take any number of texts."""
    return one.resolve() == other.resolve() and (one.is_file() or not one.exists())


def _reserved(reserved: ExitStack, name: str, path: Path | None) -> Callable[[Callable[[], str]], None]:
    """Return a function that writes a text to the path of an option, which is reserved now; None writes nothing."""
    if path is None:
        return lambda form: None
    unwritable = f"{name}: expected a file that can be written, got {path}"
    with _or_stop(unwritable):
        destination = reserved.enter_context(Destination(path))

    def write(form: Callable[[], str]) -> None:
        with _or_stop(unwritable):
            destination.write(form() + "\n")

    return write


def _print(show: Callable[[Console], object]) -> None:
    """Print on stdout, all at once; a stdout that cannot be written is no verdict."""
    with _or_stop("stdout: expected a stream that can be written"):
        if sys.stdout is None:
            raise OSError("it is closed")
        console = Console()
        with console.capture() as captured:
            show(console)
        try:
            sys.stdout.write(captured.get())
            sys.stdout.flush()
        except OSError:  # at its exit Python would flush again, fail, and return an exit code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise


@contextmanager
def _or_stop(reason: str) -> Iterator[None]:
    """Turn an error of the operating system into one line and the exit code 2."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: an invalid path, or a character without an encoding
        typer.echo(f"Error: {reason} ({error})", err=True)
        raise typer.Exit(2) from None


def _show(console: Console, target: str, outcome: ProcessEnd, verbose: bool, guessed: bool) -> None:
    if outcome.results and verbose:
        console.print(_table(outcome))
    seconds = sum(result["seconds"] for result in outcome.results.values())
    said = f"{target}: {_verdict(outcome)} ({seconds:.1f} s)"
    console.print(Text(said, COLOURS[outcome.verdict]), soft_wrap=True)
    if guessed and outcome.laws:
        said = f"inferred --convention {outcome.about['convention']}: {outcome.signature}"
        console.print(Text(said, "dim"), soft_wrap=True)
    if outcome.verdict == "right" and outcome.results.get("tail", {}).get("status") == "not applicable":
        said = "not tried: heads of which a part rotates; --rotary-dim tries them"
        console.print(Text(said, "dim"), soft_wrap=True)
    if outcome.failed and not verbose:
        console.print(Text("\n" + summary(list(outcome.results.values()), outcome.screen)), soft_wrap=True)
    elif outcome.failed:
        results = [outcome.results[law] for law in outcome.failed]
        parts = ["\n".join(filter(None, (result["words"], result["traceback"]))) for result in results]
        parts[:0] = [] if outcome.screen is None else [in_words(outcome.screen)]
        console.print(Text("\n" + "\n\n".join(parts)), soft_wrap=True)
    if noted := to_note(list(outcome.results.values())):
        heading = NOTED["wrong" if outcome.failed else "right"]
        lines = (f"\n{heading}:", *(f"  - {law}: {said}" for law, said in noted))
        console.print(Text("\n".join(lines)), soft_wrap=True)


def _table(outcome: ProcessEnd) -> Table:
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


def _verdict(outcome: ProcessEnd) -> str:
    """Return the verdict in words."""
    asked = len(outcome.laws)
    if outcome.refused:
        return f"not judged: {outcome.refused}"
    applied = sum(result["status"] != "not applicable" for result in outcome.results.values())
    many = len(outcome.failed) > 1
    broken = f"wrong: {len(outcome.failed)} of {applied} laws {'do' if many else 'does'} not hold"
    if outcome.stopped:
        done = f"{outcome.stopped}; {len(outcome.results)} of {asked} laws done"
        return f"{broken}; {done}" if outcome.failed else f"not judged: {done}"
    if outcome.verdict == "not judged":
        why = why_not_judged(list(outcome.results.values()))
        return f"not judged: nothing was compared with the definition: {why}"
    if outcome.verdict == "wrong":
        return broken
    held = sum(result["status"] == "pass" for result in outcome.results.values())
    noted = sum(result["status"] == "note" for result in outcome.results.values())
    every_one = "the one law that applies holds" if held == 1 else f"all {held} laws that apply hold"
    which = every_one if not noted else f"{held} law{'s hold' if held > 1 else ' holds'}, {noted} to note"
    return f"right: {which}" + (f", of the {asked} asked for" if asked < outcome.of else "")
