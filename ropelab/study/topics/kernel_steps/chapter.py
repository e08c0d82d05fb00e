"""Show a step in the notebook: its source, whether it is right, its prediction, its machine code and its time."""

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from IPython.display import Markdown, display

from ropelab.bench import records
from ropelab.bench.rows import timed
from ropelab.kernels import INTERPRETED
from ropelab.study.engine.words import listed, value_range
from ropelab.study.plots import gpus
from ropelab.study.topics.kernel_steps import figures, machine_code, predicted, steps
from ropelab.study.topics.kernel_steps.plans import STEPS, tile_name
from ropelab.study.topics.kernel_steps.timed import LIBRARY_AS, RECORD, Case, check

SMALL = Case(tokens=3, heads=17, head_dim=24)
"""The shape that the notebook runs: no size is a power of two."""
COLUMNS = ("gpu", "tokens", "heads", "head_dim", "contender", "status", "median_us")
IN_TORCH = next(iter(STEPS))
"""The name of step 0."""
SHOWN = [*(name for name in STEPS if name < "8"), tile_name(1, 8, 2), "8 stages, adjacent pairs", *LIBRARY_AS]
"""The contenders of the first figure; the second figure has the other tiles."""


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
        return predicted.gpus(self.where)

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
        return predicted.bytes_in_torch(*shape) if name == IN_TORCH else predicted.bytes_of(*shape)

    def predict(self, name: str) -> None:
        """Show the times that the three roofs allow."""
        moved = self.bytes(name)
        times = ", ".join(f"{moved / gpu.bytes_per_us:.1f} µs on an {gpu.name}" for gpu in self.machines)
        said = f"**Prediction.** Bytes: {moved / 1e6:,.1f} MB, {times}."
        if (facts := self.facts.get(name)) and self.machines:
            issue, starts = predicted.issue_us(facts, self.machines[0]), predicted.start_us(facts)
            said += f" Instructions: {issue:.1f} µs. Starts: {facts['programs']:,} programs, {starts:.1f} µs."
        display(Markdown(said))

    def show(self, *names: str, before: str = "") -> None:
        """Show the source of steps, run them on a small input, and compare prediction, machine code and times.

        Args:
            before: the step whose time is compared with the time of the last of ``names``.
        """
        for name in names:
            display(Markdown(fenced(source(name))))
            display(Markdown(outcome(name)))
        display(self.table(names).set_index("step").T.rename_axis(columns=None).style.format(_cell, na_rep=""))
        if before:
            self.compare(before, names[-1])

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
        gpus.link(RECORD, self.where)

    def table(self, names: Iterable[str]) -> pd.DataFrame:
        """A row for each step: its machine code, and for each GPU the times of both roofs and the measured time."""
        return pd.DataFrame([self._row(name) for name in names])

    def _row(self, name: str) -> dict[str, object]:
        facts, row = self.facts.get(name), {"step": name}
        if facts:
            asked = facts["asked_bytes"] * 32 * facts["warps"] * facts["programs"]
            row |= {
                "instructions": facts["instructions"], "bytes a store": facts["store_bytes"],
                "asked / needed": f"{asked / self.bytes(name):.2f}", "registers": facts["registers"],
                "occupancy": f"{machine_code.occupancy(facts['registers'], facts['warps']):.0%}",
            }  # fmt: skip
            row["starts, µs"] = f"{predicted.start_us(facts):.1f}"
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

    def same_machine_code(self) -> bool:
        """Whether the last step and the library's kernel have the same machine code, in both layouts."""
        pairs = zip((tile_name(1, 8, 2), "8 stages, adjacent pairs"), machine_code.IN_LIBRARY, strict=True)
        return all(self.facts[ours]["code"] == self.facts[library]["code"] for ours, library in pairs)

    def sentences(self) -> list[str]:
        """The findings of the record for the shape; none without a record."""
        said = []
        for gpu, rows in self.measured.groupby("gpu", sort=False):
            speed = rows.set_index("contender").fraction_of_copy
            steps_ = speed[[name for name in speed.index if name in STEPS]]
            last = steps_[[name for name in steps_.index if name.startswith("8")]]
            said.append(
                f"On an {gpu}, {self.words}: the lines of torch run at {speed[IN_TORCH]:.2f} of a copy, step 1 "
                f"at {speed['1 one head']:.2f}, step 3 at {speed['3 wide accesses']:.2f} and step 7 at "
                f"{speed['7 in order']:.2f}. The tiles of step 8 run at {value_range(last)}."
            )
        return said

    def compare(self, slow: str, fast: str) -> None:
        """Say how many times as long as another step a step takes on every GPU, or that it was not measured."""
        times = self.measured.pivot_table(index="gpu", columns="contender", values="median_us", sort=False)
        if {slow, fast} <= set(times):
            ratios = (times[slow] / times[fast]).dropna().items()
            said = "; ".join(f"on an {gpu} {ratio:.2f} times as long" for gpu, ratio in ratios)
            display(Markdown(f"**Measured.** *{slow}* against *{fast}*: {said}."))
        else:
            display(Markdown(f"*Not measured for {self.words}.*"))


def _cell(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def fenced(text: str) -> str:
    """Source as a block of code in markdown, without the remark that keeps the lines of its arguments together."""
    return f"```python\n{text.rstrip()}\n```".replace("  # fmt: skip", "")


def code_of(kernel: Any) -> str:
    """The source of a function of Triton, as a block of code in markdown."""
    return fenced(inspect.getsource(kernel.fn))


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
    how = "On the GPU" if device == "cuda" else "Interpreted"
    return (
        f"{how}, {SMALL.tokens} tokens x {SMALL.heads} heads x {SMALL.head_dim} features: right, and every bit is that "
        "of the library."
    )
