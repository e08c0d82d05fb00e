"""Show a step in the notebook: its source, whether it is right, its prediction, its machine code and its time."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pandas as pd
import torch
import triton
from IPython.display import HTML, Markdown, display

from ropelab.bench import records
from ropelab.bench.rows import timed
from ropelab.kernels import INTERPRETED
from ropelab.study.engine.record_links import show_records
from ropelab.study.engine.words import listed, value_range
from ropelab.study.plots import gpus
from ropelab.study.topics.kernel_steps import figures, machine_code, predicted, steps
from ropelab.study.topics.kernel_steps.plans import STEPS, tile_name
from ropelab.study.topics.kernel_steps.timed import LIBRARY, LIBRARY_AS, RECORD, Case, check

SMALL = Case(tokens=3, heads=17, head_dim=24)
"""The shape that the notebook runs: no size is a power of two."""
COLUMNS = ("gpu", "tokens", "heads", "head_dim", "contender", "status", "median_us")
IN_TORCH = next(iter(STEPS))
"""The name of step 0."""
BESIDE = ("4 strided loads", "4 strided stores")
"""Steps that only explain another step."""
SHOWN = [
    *(name for name in STEPS if name < "8" and name not in BESIDE), tile_name(1, 8, 2), "8 stages, adjacent pairs",
    *LIBRARY_AS,
]  # fmt: skip
"""The contenders of the first figure; the second figure has the other tiles."""

_SIDES = "loads", "stores", "pairs"
"""The accesses that kernels of step 4 leave strided: one side, the other, or both."""


class Chapter:
    """The steps for one shape.

    Args:
        where: the records.
        case: the shape of the tables. Times are there for the shapes of the study.
    """

    def __init__(self, where: records.Selection, case: Case):
        self.where, self.case = where, case

    @property
    def words(self) -> str:
        """The shape as text."""
        return f"{self.case.tokens:,} tokens x {self.case.heads} heads x {self.case.head_dim} features"

    @cached_property
    def facts(self) -> dict[str, dict[str, Any]]:
        """The name of each step -> the facts of its machine code."""
        names = [*(name for name, step in STEPS.items() if step.plan), *machine_code.IN_LIBRARY]
        return machine_code.compiled_facts(names, self.case.tokens, self.case.heads, self.case.head_dim)

    @cached_property
    def machines(self) -> list[predicted.Gpu]:
        """The GPUs whose times the record has; without a record, every GPU with a measured copy."""
        found = predicted.gpus(self.where)
        return [gpu for gpu in found if gpu.name in set(self.times.gpu)] or found

    @property
    def compilers(self) -> str:
        """Which version of Triton the two kinds of numbers in a row come from."""
        times = " and ".join(
            sorted({record.provenance["triton"] for record in records.of_each_gpu(RECORD, self.where)})
        )
        if times == triton.__version__:
            return f"Times and machine code are of Triton {times}."
        return f"The times are of Triton {times}, the machine code is of Triton {triton.__version__}: a row joins both."

    @cached_property
    def times(self) -> pd.DataFrame:
        """The record of every GPU in one table with the column ``gpu``; empty, with a note, where there is none."""
        return timed(self._recorded[0])

    @cached_property
    def _recorded(self) -> tuple[pd.DataFrame, str]:
        try:
            return gpus.together(RECORD, self.where)
        except records.Unusable as error:
            display(Markdown(f"*No times yet: {error}.*"))
            return pd.DataFrame(columns=[*COLUMNS]), ""

    @property
    def measured(self) -> pd.DataFrame:
        """The rows of `times` of the shape."""
        rows = self.times
        same = (rows[["tokens", "heads", "head_dim"]] == [self.case.tokens, self.case.heads, self.case.head_dim]).all(
            axis=1
        )
        return rows[same]

    def bytes(self, name: str) -> int:
        """The bytes that a step moves at least; the operations of torch each move their operands."""
        shape = self.case.tokens, self.case.heads, self.case.head_dim
        if name == IN_TORCH:
            return predicted.bytes_in_torch(*shape)
        step = STEPS.get(LIBRARY_AS.get(name, name))
        by_position = step is not None and step.positions
        return predicted.bytes_of(*shape, rows=self.case.longest if by_position else self.case.tokens)

    def show(self, *names: str, before: str = "", changed_from: str = "") -> None:
        """Show the source of steps, run them on a small input, and fold prediction, machine code and times.

        Args:
            before: the step whose machine code and time are compared with those of the last of ``names``.
            changed_from: the step of which the source of ``names`` differs in a few lines; only these are shown.
        """
        for name in names:
            code = source(name)
            display(Markdown(fenced(changes(source(changed_from), code), "diff") if changed_from else fenced(code)))
            display(Markdown(outcome(name)))
        self.beside(*names, before=before)

    def beside(self, *names: str, before: str = "") -> None:
        """Fold the table of steps side by side, and the comparison of the last of them with ``before``."""
        table = self.table(names).set_index("step").T.rename_axis(columns=None).style.format(_cell, na_rep="not timed")
        said = "".join(f"<p>{sentence}</p>" for sentence in self.compared(before, names[-1])) if before else ""
        display(HTML(f"<details><summary>Prediction, machine code and time</summary>{table.to_html()}{said}</details>"))

    def figure(self, name: str) -> None:
        """Draw a figure of the shape: "fractions", "roofline" or "tiles"; or say that there are no times."""
        rows, footer = self.measured, self._recorded[1]
        if rows.empty:
            display(Markdown(f"*There is no figure: no times of {self.words}.*"))
            return
        timed_machines = [machine for machine in self.machines if machine.name in set(rows.gpu)]
        drawn = {
            "fractions": lambda: figures.fractions(rows, SHOWN, footer),
            "roofline": lambda: figures.roofline(rows, self.facts, timed_machines, SHOWN, footer),
            "tiles": lambda: figures.tiles(rows, self.facts, footer),
        }[name]()
        display(drawn)
        show_records([RECORD], self.where)

    def table(self, names: Iterable[str]) -> pd.DataFrame:
        """A row for each step: its machine code, and for each GPU the times of both roofs and the measured time."""
        return pd.DataFrame([self._row(name) for name in names])

    def _row(self, name: str) -> dict[str, object]:
        facts, row = self.facts.get(name), {"step": name}
        if facts:
            asked = facts["asked_bytes"] * 32 * facts["warps"] * facts["programs"]
            row |= {
                "instructions": facts["instructions"],
                "early loads": f"{facts['early_loads']} of {facts['loads']}", "bytes a store": facts["store_bytes"],
                "asked / needed": f"{asked / self.bytes(name):.2f}", "registers": facts["registers"],
                "occupancy": f"{machine_code.occupancy(facts['registers'], facts['warps']):.0%}",
                "starts, µs": f"{predicted.start_us(facts):.1f}",
            }  # fmt: skip
            row["issue, µs"] = listed(f"{predicted.issue_us(facts, gpu):.1f}" for gpu in self.machines)
        for gpu in self.machines:
            row[f"{gpu.name}: bytes, µs"] = f"{self.bytes(name) / gpu.bytes_per_us:.1f}"
            found = self.measured[(self.measured.gpu == gpu.name) & (self.measured.contender == name)]
            for one in found.itertuples():
                row[f"{gpu.name}: measured, µs"] = f"{one.median_us:.1f} ({one.q20_us:.1f} to {one.q80_us:.1f})"
                row[f"{gpu.name}: of a copy"] = f"{one.fraction_of_copy:.2f}"
        return row

    def display_table(self, names: Iterable[str]) -> None:
        """Show `table` of these steps."""
        look = {"text-align": "left", "white-space": "nowrap"}
        display(self.table(names).style.hide(axis="index").set_properties(**look).format(_cell, na_rep=""))

    def beside_the_library(self) -> str:
        """Whether the last step and the library's kernel have the same machine code, in both layouts, in words."""
        pairs = zip((tile_name(1, 8, 2), "8 stages, adjacent pairs"), machine_code.IN_LIBRARY, strict=True)
        same = all(self.facts[ours]["code"] == self.facts[library]["code"] for ours, library in pairs)
        return (
            f"For a tile of 1 token and 8 heads, the last step compiles to {'the same' if same else 'other'} machine "
            f"code {'as' if same else 'than'} the library's kernel, in both layouts."
        )

    def sentences(self) -> list[str]:
        """The findings of the record for the shape; none without a record."""
        said = []
        for gpu, rows in self.measured.groupby("gpu", sort=False):
            speed = rows.set_index("contender").fraction_of_copy
            last = speed[[name for name in speed.index if name in STEPS and name.startswith("8")]]
            said.append(
                f"On an {gpu}, {self.words}: the lines of torch run at {speed[IN_TORCH]:.2f} of a copy, step 1 at "
                f"{speed['1 one head']:.2f}, step 3 at {speed['3 wide accesses']:.2f} (the library "
                f"{speed[LIBRARY]:.2f}). By positions step 7 runs at {speed['7 in order']:.2f} (the library "
                f"{speed[f'{LIBRARY}, positions']:.2f}) and the tiles of step 8 at {value_range(last)}."
            )
        return said

    def mapping(self, *names: str) -> None:
        """Show how the tile of steps lies in the threads and warps of a program, in Triton's words."""
        display(Markdown("\n".join(f"- {name}: `{self.facts[name]['mapping']}`" for name in names)))

    def fastest(self) -> list[str]:
        """The fastest kernel of every other shape of the record."""
        said = []
        ours = self.times[self.times.contender.isin(STEPS)]
        for (gpu, *shape), rows in ours.groupby(["gpu", "tokens", "heads", "head_dim"], sort=False):
            if (case := Case(*shape)) != self.case:
                best = rows.loc[rows.median_us.idxmin()]
                said.append(
                    f"On an {gpu}, {Chapter(self.where, case).words}: *{best.contender}* is the fastest step, with "
                    f"{best.fraction_of_copy:.2f} of a copy."
                )
        return said

    def sides(self) -> list[str]:
        """Which accesses of the strided kernel cost the time: a sentence for each GPU whose record has both kernels."""
        said = []
        for gpu, rows in self.measured.groupby("gpu", sort=False):
            took = rows.set_index("contender").median_us
            if {"4 strided loads", "4 strided stores"} <= set(took.index):
                loads, stores, both = (took[f"4 strided {each}"] / took["4 split pairs"] for each in _SIDES)
                said.append(
                    f"On an {gpu}, strided loads alone take {loads:.1f} times as long as split pairs, strided stores "
                    f"alone {stores:.1f} times, and both {both:.1f} times."
                )
        return said

    def over_shapes(self, before: str, after: str) -> list[str]:
        """How much less time a step takes than another in every shape: a sentence for each GPU with both."""
        said = []
        for gpu, rows in self.times.groupby("gpu", sort=False):
            took = rows.pivot_table(index=["tokens", "head_dim"], columns="contender", values="median_us")
            if {before, after} <= set(took):
                less = (1 - took[after] / took[before]).dropna()
                each = "; ".join(
                    f"{tokens:,} tokens x {features} features: {share:.1%}"
                    for (tokens, features), share in less.items()
                )
                said.append(f"On an {gpu}, *{after}* takes less time than *{before}*: {each}.")
        return said

    def instructions(self, name: str) -> tuple[int, int]:
        """The instructions of a warp of a step, and of all its warps."""
        facts = self.facts[name]
        return facts["instructions"], facts["instructions"] * facts["warps"] * facts["programs"]

    def compared(self, slow: str, fast: str) -> list[str]:
        """Say how instructions and time change from one step to another, and how near the highest roof is."""
        said = []
        if {slow, fast} <= set(self.facts):
            one, every = zip(*map(self.instructions, (slow, fast)), strict=True)
            said.append(
                f"From {slow} to {fast}, instructions of all warps: {every[0] / 1e6:.1f} to {every[1] / 1e6:.1f} "
                f"million ({_change(*every)}); of one warp: {one[0]} to {one[1]}."
            )
        times = self.measured.pivot_table(index="gpu", columns="contender", values="median_us", sort=False)
        if not {slow, fast} <= set(times):
            return [*said, f"The record has no time of both for {self.words}."]
        for gpu in self.machines:
            took = times.loc[gpu.name, [slow, fast]]
            if took.isna().any():
                said.append(f"The record of the {gpu.name} has no time of {took.index[took.isna()][0]}.")
                continue
            roofs = {"bytes": self.bytes(fast) / gpu.bytes_per_us}
            if facts := self.facts.get(fast):
                roofs |= {"instructions": predicted.issue_us(facts, gpu), "starts": predicted.start_us(facts)}
            highest = max(roofs, key=roofs.__getitem__)
            said.append(
                f"On an {gpu.name}: {took.iloc[0]:.1f} to {took.iloc[1]:.1f} µs ({_change(*took)}). The highest roof "
                f"of {fast} is {highest}: {roofs[highest]:.1f} µs, {roofs[highest] / took.iloc[1]:.2f} of its time."
            )
        return said


def _cell(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _change(before: float, after: float) -> str:
    """``"-45 %"``."""
    return re.sub(r"^[+-]0 ", "±0 ", f"{100 * (after / before - 1):+.0f} %")


def fenced(text: str, language: str = "python") -> str:
    """Source as a block of code in markdown, without the remark that keeps the lines of its arguments together."""
    return f"```{language}\n{text.rstrip()}\n```".replace("  # fmt: skip", "")


def changes(before: str, after: str) -> str:
    """The lines that differ between two sources apart from remarks, each group with the lines beside it."""
    sources = ([re.sub("  #.*", "", line) for line in text.splitlines()] for text in (before, after))
    lines = difflib.unified_diff(*sources, n=1, lineterm="")
    return "\n".join(re.sub("^@@.*", "", line) for line in list(lines)[2:]).strip("\n")


def code_of(kernel: Any, first: str = "", last: str = "") -> str:
    """The source of a function of Triton, as a block of code in markdown.

    Args:
        first, last: text of the lines with which an excerpt begins and ends; by default the whole function.
    """
    lines = inspect.getsource(kernel.fn).splitlines()
    begin = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if i >= begin and last in line) if last else len(lines) - 1
    return fenced(textwrap.dedent("\n".join(lines[begin : end + 1])))


def source(name: str) -> str:
    """The source of a step, as the study runs it."""
    step = STEPS[name]
    if step.plan is None:
        return inspect.getsource(steps.in_torch)
    inputs = SMALL.inputs(1, "cpu")[0]
    return inspect.getsource(step.plan(inputs, torch.empty_like(inputs.x)).kernel.fn)


def outcome(name: str) -> str:
    """Run a step on `SMALL` in float16, and say whether it is right and has the bits of the library."""
    if not (torch.cuda.is_available() or INTERPRETED):
        return "*Not run here: Triton's interpreter needs `TRITON_INTERPRET=1` before the first import.*"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (inputs,) = SMALL.inputs(1, device, torch.float16)
    step = STEPS[name]
    status = check(step, inputs)
    same = torch.equal(step(inputs), step.in_library(inputs))
    if status != "ok" or not same:
        raise AssertionError(f"{name}: {status}, {'the same' if same else 'other'} bits as the library")
    how = "On the GPU" if device == "cuda" else "Interpreted" if step.plan else "In torch"
    return (
        f"{how}, {SMALL.tokens} tokens x {SMALL.heads} heads x {SMALL.head_dim} features: right, and every bit is that "
        "of the library."
    )
