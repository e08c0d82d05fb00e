"""Judge a kernel in a cell: is it right, what did the compiler make of it, where do its threads lie, how fast is it."""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cached_property
from math import isnan
from typing import Any

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display

import ropelab
from ropelab.bench import records
from ropelab.bench.rows import timed
from ropelab.kernels import INTERPRETED
from ropelab.study.engine import noise
from ropelab.study.engine.record_links import show_records
from ropelab.study.engine.repeats import between_runs
from ropelab.study.engine.words import listed
from ropelab.study.topics.kernel_steps import figures, machine_code, predicted, threads
from ropelab.study.topics.kernel_steps.layout import Move
from ropelab.study.topics.kernel_steps.step import STEPS, Step
from ropelab.study.topics.kernel_steps.step import step as make_step
from ropelab.study.topics.kernel_steps.timed import COPY, LIBRARY_AS, RECORD, Case, beside_copy

SMALL = Case(tokens=3, heads=17, head_dim=24)
"""The shape that is compared with the library where Triton interprets: no size is a power of two."""
IN_TORCH = next(iter(STEPS))
"""The name of step 0."""
ASIDE = ("4 strided loads", "4 strided stores", "6 positions", "7 order alone")
"""Steps that only explain another step; the bar chart leaves them out."""
LAST = "library, positions"


class Judge:
    """Judge kernels for one shape in bfloat16: call it with a kernel, its grid and its constants.

    Args:
        where: the records. Of several GPUs the one whose record has most of the steps is the GPU of the chapter.
        case: the shape for which a kernel is compiled and timed.
        brief: show a line in place of the table, the stores alone and no bars.
    """

    def __init__(self, where: records.Selection, case: Case, brief: bool = False):
        self.where, self.case, self.brief = where, case, brief
        self.here: dict[str, float] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._drawn: list[tuple[Any, ...]] = []
        self._edited: set[str] = set()

    def __call__(self, kernel: Any, grid: Any = None, *, step: str, **constants: Any) -> None:
        """Show whether a kernel has the library's bits, its machine code, its threads on memory, and its speed.

        Args:
            kernel: its arguments are named as those of `Inputs.arguments` and ``constants``. Or a function of torch.
            grid: a function of the arguments by name, as Triton takes it.
            step: the name of the step; the record has times of the chapter's own kernels, not of one that was edited.
            constants: ``layout`` and ``inverse`` as `ropelab.apply_rope` takes them; constants of the kernel; options
                of the compiler.
        """
        judged = make_step(kernel, grid, step=step, **constants)
        display(Markdown(outcome(judged)))
        found = self._facts[judged.name] = self._compiled(judged)
        known = STEPS.get(judged.name)
        edited = known is not None and _code(judged) != _code(known)
        (self._edited.add if edited else self._edited.discard)(judged.name)
        if torch.cuda.is_available():
            took, copy = beside_copy(judged, self.case)
            self.here[judged.name] = copy / took
            gpu = torch.cuda.get_device_name()
            display(Markdown(f"On this {gpu}: **{took:.1f} µs**, {copy / took:.2f} of a copy."))
        elif edited:
            display(Markdown("The record has the time of the chapter's kernel, and none of this one."))
        if not self.brief:
            table = self.table(self._with_step_before(judged)).set_index("step").T.rename_axis(columns=None)
            display(table.style.apply(_highest_roof))
        elif found:
            made = "{instructions} instructions, {registers} registers, at most {store_bytes} bytes a store".format(
                **found
            )
            display(Markdown(f"For an H100, by Triton {triton.__version__}: {made}."))
        moves = found.get("moves", [])
        self._lies(judged, moves)
        if known is not None and known.name.startswith("4 strided") and not (edited or self.here):
            if (then := threads.strided_in_record(moves)) != moves:
                self._lies(judged, then, f"in the record, Triton {self.record.provenance['triton']}")
        if not (self.brief or judged.name in ASIDE):
            self.ladder(judged.name)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.case.tokens, self.case.heads, self.case.head_dim

    @property
    def words(self) -> str:
        """The shape as text."""
        return f"{self.case.tokens:,} tokens x {self.case.heads} heads x {self.case.head_dim} features"

    @cached_property
    def record(self) -> records.Record:
        """The record of the GPU of the chapter."""
        found = records.of_each_gpu(RECORD, self.where)
        return max(found, key=lambda record: timed(record.frame).contender.isin(STEPS).sum())

    @cached_property
    def gpu(self) -> predicted.Gpu:
        return predicted.gpus(records.selection(self.where.directory, self.record.provenance["gpu"]["name"]))[0]

    @cached_property
    def times(self) -> pd.DataFrame:
        """The recorded times of the shape, by contender, as `noisy` returns them; empty for other shapes."""
        rows = noisy(RECORD, self.record.frame)
        same = (rows[["tokens", "heads", "head_dim"]] == [*self.shape]).all(axis=1)
        return rows[same].set_index("contender")

    def facts(self, name: str) -> dict[str, Any]:
        """The facts of the machine code of a step of the study, or of the reader's kernel of that name."""
        if name not in self._facts:
            self._facts[name] = self._compiled(STEPS[LIBRARY_AS.get(name, name)])
        return self._facts[name]

    def _compiled(self, judged: Step) -> dict[str, Any]:
        """The facts of a step; none of lines of torch, and none where Triton has no tools for this GPU."""
        known = not judged.in_torch and machine_code.TOOLS.exists()
        return machine_code.compiled_facts(judged, *self.shape) if known else {}

    def bytes(self, name: str) -> int:
        """The bytes that a step moves at least; the operations of torch each move their operands."""
        if name == IN_TORCH:
            return predicted.bytes_in_torch(*self.shape)
        known = STEPS.get(LIBRARY_AS.get(name, name))
        by_position = known is not None and known.positions
        return predicted.bytes_of(*self.shape, rows=self.case.longest if by_position else self.case.tokens)

    def roofs(self, name: str) -> dict[str, float]:
        """`predicted.roofs` of a step on the GPU of the chapter, in microseconds."""
        return predicted.roofs(self.facts(name), self.gpu, self.bytes(name))

    def table(self, names: Sequence[str]) -> pd.DataFrame:
        """A row for each step: its machine code, its roofs and its recorded time."""
        rows = [self._row(name) for name in names]
        columns = dict.fromkeys(column for row in reversed(rows) for column in row)
        return pd.DataFrame(rows, columns=[*columns]).fillna("")

    def _row(self, name: str) -> dict[str, str]:
        facts, row = self.facts(name), {"step": name}
        if facts:
            registers = facts["registers"]
            row |= {
                "programs": f"{facts['programs']:,}", "instructions": str(facts["instructions"]),
                "registers, warps that fit": f"{registers}, {machine_code.occupancy(registers, facts['warps']):.0%}",
                "widest load, store": f"{facts['load_bytes']}, {facts['store_bytes']} bytes",
                "loads before arithmetic": f"{facts['early_loads']} of {facts['loads']}",
            }  # fmt: skip
        row |= {f"roof: {by}, µs": f"{us:.1f}" for by, us in self.roofs(name).items()}
        if name in self.times.index and name not in self._edited:
            row[f"{self.gpu.name}, Triton {self.record.provenance['triton']}, µs"] = f"{self.times.median_us[name]:.1f}"
        return row

    def _with_step_before(self, judged: Step) -> list[str]:
        """The step and the last of its layout, else the last, that was judged and stands before it in the chapter."""
        earlier = [each for each in [*STEPS][: [*STEPS, judged.name].index(judged.name)] if each in self._facts]
        alike = [each for each in earlier if STEPS[each].layout == judged.layout]
        return [*(alike or earlier)[-1:], judged.name]

    def ladder(self, now: str = "") -> None:
        """Draw the bars of the steps up to ``now``, or of all; on a GPU the bars are those of this GPU."""
        chosen = [name for name in STEPS if name[0] != "8" and name not in ASIDE] + [LAST] * (not now)
        if now:
            chosen = chosen[: chosen.index(now) + 1] if now in chosen else [*chosen, now]
        speed = self.here or self.times.fraction_of_copy.drop([*self._edited], errors="ignore").to_dict()
        copy = self.times.median_us.get(COPY, self.case.bytes / self.gpu.bytes_per_us)
        rows = []
        for name in chosen:
            roofs = self.roofs(name) if now or name in self._facts else {"bytes": float("nan")}
            by = max(roofs, key=roofs.__getitem__)
            rows.append((name, speed.get(name, float("nan")), copy / roofs[by], by))
        reached = rows[-1][1]
        result = "not timed" if isnan(reached) else f"{reached:.2f} of a copy"
        title = f"{now}: {result}" if now else f"{self.words}, beside a copy"
        footer = "timed in this run" if self.here else self.record.footer
        display(figures.ladder(pd.DataFrame(rows, columns=["step", "speed", "roof", "by"]), title, footer, now))
        if not now:
            show_records([RECORD], records.selection(self.where.directory, self.record.provenance["gpu"]["name"]))
            if self.times.empty:
                shapes = timed(self.record.frame)[["tokens", "heads", "head_dim"]].drop_duplicates().to_numpy().tolist()
                display(Markdown(f"*The record has no times of {self.words}, but of {listed(map(tuple, shapes))}.*"))

    def _lies(self, judged: Step, moves: Sequence[Move], where: str = "of a warp") -> None:
        """Draw the threads of a step on memory, unless they lie as those of the step before."""
        found = threads.accesses(judged, moves, *self.shape[1:]) if moves else []
        drawn: dict[tuple[bytes, ...], list[threads.Access]] = {}
        for wanted in [("load", "x"), ("store", "y")][self.brief :]:
            for access in [each for each in found if (each.kind, each.of) == wanted][:1]:
                looks = access.place.tobytes(), access.thread.tobytes(), access.instruction.tobytes()
                drawn.setdefault(looks, []).append(access)
        if drawn and [*drawn] == self._drawn:
            display(Markdown("The threads lie on memory as before."))
        for same in drawn.values() if [*drawn] != self._drawn else ():
            kinds = " and ".join(access.kind for access in same)
            display(figures.lying(same[0], self.case.head_dim, _lying(same[0], f"{kinds} {where}")))
        self._drawn = [*drawn] or self._drawn


def _highest_roof(column: pd.Series) -> list[str]:
    """Bold letters for the highest roof of a column of `Judge.table`."""
    roofs = {row: float(us) for row, us in column.items() if row.startswith("roof") and us}
    highest = max(roofs, key=roofs.__getitem__, default="")
    return ["font-weight: bold" * (row == highest) for row in column.index]


def noisy(study: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The timed rows with ``low`` and ``high``: the least and the largest time that noise allows, over the median."""
    times = timed(frame)
    times = times.assign(between_runs=between_runs(study, times))
    found = [noise.time(row) for _, row in times.iterrows()]
    return times.assign(low=[one.low / one.value for one in found], high=[one.high / one.value for one in found])


def outcome(judged: Step) -> str:
    """Run a step on a small input in float16, and say how many elements are not the library's."""
    if not (torch.cuda.is_available() or INTERPRETED):
        return "*Not run here: Triton's interpreter needs `TRITON_INTERPRET=1` before the first import.*"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (inputs,) = SMALL.inputs(1, device, torch.float16)
    with ropelab.use_backend("triton" if device == "cuda" else "torch"):  # the same bits, and no interpreter
        right = judged.in_library(inputs)
    y = judged(inputs)
    other = int((y.view(torch.int16) != right.view(torch.int16)).sum())
    how = "On the GPU" if device == "cuda" else "In torch" if judged.in_torch else "Interpreted"
    shape = f"{SMALL.tokens} tokens x {SMALL.heads} heads x {SMALL.head_dim} features"
    if not other:
        return f"{how}, {shape}: **every bit is that of the library**."
    off = (y.float() - right.float()).abs().max()
    return f"{how}, {shape}: **{other:,} of {y.numel():,} elements are others** than the library's, by up to {off:.2g}."


def _code(judged: Step) -> tuple[Any, ...]:
    """What a step runs: its functions without their remarks and line breaks, its constants and its call."""
    functions = (getattr(function, "fn", function) for function in (judged.kernel, judged.grid) if function)
    sources = [ast.dump(ast.parse(textwrap.dedent(inspect.getsource(function)))) for function in functions]
    return sources, dict(judged.constants), judged.layout, judged.inverse


def _lying(access: threads.Access, name: str) -> str:
    """What the first request of an access moves, in words."""
    places = access.place[access.first] * access.itemsize
    sectors, moved = len({*(places // threads.SECTOR).tolist()}), len(places) * access.itemsize
    part = moved / (sectors * threads.SECTOR)
    return f"One {name}: {moved} bytes, {'all' if part == 1 else f'{100 * part:g}%'} of {sectors} sectors"


def fenced(text: str, language: str = "python") -> str:
    """Source as a block of code in markdown, without the remark that keeps the lines of its arguments together."""
    return f"```{language}\n{text.rstrip()}\n```".replace("  # fmt: skip", "")


def code_of(kernel: Any, first: str = "", last: str = "") -> str:
    """The source of a function of Triton, as a block of code in markdown.

    Args:
        first, last: text of the lines with which an excerpt begins and ends; by default the whole function.
    """
    lines = inspect.getsource(kernel.fn).splitlines()
    begin = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if i >= begin and last in line) if last else len(lines) - 1
    return fenced(textwrap.dedent("\n".join(lines[begin : end + 1])))
