"""Time the steps of the chapter that writes the kernel, beside the library and copies of the same bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.bench import copies, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cells import progress
from ropelab.bench.operation import tidy
from ropelab.bench.rows import are_copies
from ropelab.bench.study import Study
from ropelab.study.topics.kernel_steps.step import STEPS, Inputs, Step, sources

RECORD = "kernel_steps"
"""The name of the record."""
COPY, LIBRARY = "copy", "library"
SEQUENCES = 16
ROUNDINGS = 1 + 2**-12
"""The error of a head that is allowed, in unit roundoffs of 16 bits, relative to the norm of the head.

Each element is rounded once to 16 bits. Before, float32 rounds two products and a sum of a pair: at most
``2 * 2^-24 * sqrt(2)`` of the norm of the pair, less than ``2^-22``, which is ``2^-13`` of the roundoff of bfloat16.
"""
_CHECKED = 256
"""The most tokens that are compared with the definition in float64."""


@dataclass(frozen=True)
class Case:
    """A shape in bfloat16."""

    tokens: int
    heads: int
    head_dim: int

    @property
    def bytes(self) -> int:
        """The bytes that must move: every element is read once and written once. Tables and positions do not count."""
        return 2 * 2 * self.tokens * self.heads * self.head_dim

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where packed sequences of growing lengths begin and end."""
        number = torch.arange(SEQUENCES + 1)
        return number * (number + 1) * self.tokens // (SEQUENCES * (SEQUENCES + 1))

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence, and so the rows of the tables that positions name."""
        return int(self.cu_seqlens.diff().max())

    def inputs(self, count: int, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> list[Inputs]:
        """``count`` sets, which share tables and packed sequences of growing lengths."""
        generator = torch.Generator(device).manual_seed(0)
        positions = torch.cat([torch.arange(length) for length in self.cu_seqlens.diff().tolist()])
        tables = ropelab.rotary_table(self.tokens, self.head_dim, device=device)
        shape = self.tokens, self.heads, self.head_dim
        return [
            Inputs(torch.randn(shape, generator=generator, device=device, dtype=dtype), *tables,
                   self.cu_seqlens.to(device, torch.int32), positions.to(device, torch.int32))
            for _ in range(count)
        ]  # fmt: skip


CASES = (Case(16384, 32, 128), Case(4096, 32, 128), Case(16, 32, 128), Case(4096, 32, 72))
"""Many tokens, fewer, as few as in decoding, and heads of an odd number of 16 bytes."""


def kernel_steps(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time every step in every case.

    Columns: tokens, heads, head_dim, bytes, contender, layout, status, median_us, q20_us, q80_us, samples,
        fraction_of_copy, and bits: "equal" or "other", compared with the library's result. ``library`` rotates halves
        by place, as step 3 does; with ", positions" and ", adjacent pairs" it does as steps 7 and 8. ``copy`` is the
        fastest copy of the same bytes.
    """
    cases = [replace(CASES[-1], tokens=64)] if smoke else CASES
    described = progress(cases, lambda case: f"{case.tokens} x {case.heads} x {case.head_dim}")
    return pd.concat([_compare(case, device, 3 if smoke else 12) for case in described], ignore_index=True)


def _compare(case: Case, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = case.inputs(_sets(case), device)
    status, bits = {}, {}
    for name, step in STEPS.items():
        if not timing.is_stopped():
            status[name], bits[name] = _outcome(step, replace(case, tokens=min(case.tokens, _CHECKED)), case, device)
    right = {name: step for name, step in STEPS.items() if status.get(name, "ok") == "ok"}
    timed = {name: partial(_calls, step, sets) for name, step in right.items()} | {
        name: partial(_calls, STEPS[like].in_library, sets) for name, like in LIBRARY_AS.items()
    }
    frame = copies.with_fraction(timing.gpu_times(timed | copies.contenders([[s.x] for s in sets]), rounds=rounds))
    is_copy = are_copies(frame)
    fastest = frame[is_copy].sort_values("median_us").head(1).assign(contender=COPY)
    frame = pd.concat([frame[~is_copy], fastest], ignore_index=True)
    identity = {"tokens": case.tokens, "heads": case.heads, "head_dim": case.head_dim, "bytes": case.bytes}
    frame = tidy(frame, identity, {name: why for name, why in status.items() if why != "ok"})
    torch.cuda.empty_cache()  # the graphs have memory of their own
    layouts = {name: step.layout for name, step in STEPS.items()} | {
        name: STEPS[like].layout for name, like in LIBRARY_AS.items()
    }
    facts = {"layout": layouts, "bits": bits}
    return frame.assign(**{fact: [of.get(name, "") for name in frame.contender] for fact, of in facts.items()})


def beside_copy(step: Step, case: Case) -> tuple[float, float]:
    """The microseconds of a step on the GPU at hand, and of the fastest copy of as many bytes, in the same rounds."""
    sets = case.inputs(_sets(case), "cuda")
    contenders = {step.name: partial(_calls, step, sets)} | copies.contenders([[s.x] for s in sets])
    frame = timing.gpu_times(contenders, rounds=3)
    if frame.status[0] != "ok":
        raise RuntimeError(frame.status[0])
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return frame.median_us[0], frame.median_us[1:].min()


def _sets(case: Case) -> int:
    """As many sets of buffers as leave the L2 cache without those of the next call."""
    return min(max(2, -(-4 * timing.cache_bytes() // case.bytes)), 512)


LIBRARY_AS = {
    LIBRARY: "3 wide accesses",
    f"{LIBRARY}, backward": "5 backward",
    f"{LIBRARY}, positions": "7 in order",
    f"{LIBRARY}, positions, adjacent pairs": "8 stages, adjacent pairs",
}
"""The contender that is the library -> the step that rotates in the same way."""


def check(step: Step, inputs: Inputs) -> str:
    """``"ok"`` if a step agrees with the definition in float64."""
    right = reference.rotate(inputs.x.double(), inputs.cos.double(), inputs.sin.double(), **step.options(inputs))
    return disagreement({"y": step(inputs)}, {"y": right}, ROUNDINGS)


def _outcome(step: Step, small: Case, case: Case, device: torch.device | str) -> tuple[str, str]:
    """The status of a step for the first tokens, and whether it has all bits of the library."""
    try:
        (inputs,) = case.inputs(1, device)
        same = torch.equal(step(inputs), step.in_library(inputs))
        return check(step, small.inputs(1, device)[0]), "equal" if same else "other"
    except Exception as error:  # the status records the error
        return timing.failure(error), ""


def _calls(run: Callable[[Inputs], torch.Tensor], sets: Sequence[Inputs]) -> list[Callable[[], torch.Tensor]]:
    return [partial(run, inputs) for inputs in sets]


STUDIES = {RECORD: Study(kernel_steps, gpu_gib=4, sources=sources, rows=4)}
