"""Hold the libraries that this project compiled from published code against libraries that somebody published.

The file of a document says which contenders ran such a library, and what controls it:

    [built]
    contenders = ["#3057 (6c46696)*"]          # patterns of names

    [built.control]                            # a test whose ratio must be 1, in the record of its times
    record = "te_kernels"
    over = "#3057 (6c46696), old grid"         # compiled here
    under = "TransformerEngine 2.18"           # the same kernel in a published library
    cell = ["step", "n_seqs"]
    near = 1.0

What the build is off by counts beside the noise (`ropelab.study.engine.comparisons.Comparison.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from ropelab.bench import records
from ropelab.study.engine.comparisons import Comparison, Frames
from ropelab.study.engine.repeats import LIBRARY
from ropelab.study.engine.verdict import Untold


@dataclass(frozen=True)
class Built:
    """The contenders of a document that this project compiled.

    Attributes:
        contenders: patterns of their names.
        control: the time of one of them over that of the same kernel in a published library; None where no published
            library has the code.
    """

    contenders: tuple[str, ...] = ()
    control: Comparison | None = None

    @classmethod
    def read(cls, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Built:
        """As the file of a document states it."""
        control = table.get("control")
        test = Comparison.read("control", {**defaults, **control}) if control else None
        return cls(tuple(table.get("contenders", ())), test)

    def runs_in(self, *tests: Comparison) -> bool:
        """Whether a test compares times of these contenders."""
        names = {side.get("contender", "") for x in tests if not x.quantity for side in (x.over, x.under or {})}
        return any(fnmatch(name, pattern) for name in names for pattern in self.contenders)

    def controls(self, *tests: Comparison) -> list[Comparison]:
        """The control, if a test needs it."""
        return [self.control] if self.control and self.runs_in(*tests) else []

    def off(self, frames: Frames) -> float:
        """The largest distance of the times from those of the published library; 0 within the noise."""
        if self.control is None:
            return 0.0
        values = self.control.values(frames, "the control of what this project compiled")
        return max((max(x.value, 1 / x.value) - 1 for x in values.values() if 1.0 not in x), default=0.0)

    def off_in(self, frames: Frames) -> Callable[[Comparison], float]:
        """What the contenders of a test are off by: `off` where it times these, else 0."""
        return lambda test: self.off(frames) if self.runs_in(test) else 0.0

    def said(self, tests: Sequence[Comparison], frames: Frames) -> str:
        """What is known of the libraries, if these tests rest on times of them; "" if not, or if nothing is off."""
        if not self.runs_in(*tests):
            return ""
        if self.control is None:
            return "compiled by this project; no published library has the code, so that nothing controls the build"
        try:
            off = self.off(frames)
        except Untold as missing:
            return f"compiled by this project; the record lacks {missing}"
        return f"compiled by this project: {self.control.what} is up to {off:.1%} off 1" if off else ""


def others(names: Iterable[str], where: records.Selection) -> list[str]:
    """The GPUs whose records of these names ran another build of a library that this project compiled."""
    found: dict[str, None] = {}
    for name in names:
        of = {gpu: _checksums(name, records.Selection(where.directory, gpu)) for gpu in records.gpus(where.directory)}
        mine = of.get(where.gpu or "", {})
        found |= {gpu: None for gpu, built in of.items() if any(built.get(x, y) != y for x, y in mine.items())}
    return list(found)


def _checksums(name: str, where: records.Selection) -> dict[str, str]:
    """The checksum of each library that this project compiled and the record names."""
    try:
        peers = records.load(name, where).provenance.get("peers") or {}
    except records.Unusable:
        return {}
    return {library: checksum for library, checksum in peers.items() if LIBRARY.search(library)}
