"""Look for the smallest wrong call: Hypothesis shrinks extents, positions, documents, dtype and direction together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from random import Random
from typing import Any

import torch

from ropelab.conformance.case import Sizes
from ropelab.conformance.law import Law
from ropelab.conformance.laws.addressing import axes_positions
from ropelab.conformance.subject import Subject
from ropelab.conformance.watched import Seen, watch

MOST_CALLS = 300
SECONDS = 3.0
"""The limits of a search: calls, and seconds of CPU time of this thread."""


@dataclass(frozen=True)
class Call:
    """A call that the search makes.

    Attributes:
        sizes: the extents of the inputs.
        gradient: whether the gradients are compared, not the results.
        where: other attributes of the case.
    """

    sizes: Sizes
    gradient: bool
    where: dict[str, Any]

    @property
    def cost(self) -> tuple[int, ...]:
        """The smaller, the simpler is the call."""
        s, positions = self.sizes, [*map(str, self.where.values())]
        elements = s.batch * s.tokens * (s.q_heads + s.k_heads) * s.head_dim
        return self.gradient, len(self.where), elements, len(str(positions))

    def law(self) -> Law:
        """Return a law that makes this one call, with the numbers that its subject draws."""

        def compare(subject, sizes):
            case = subject.draw(sizes, **self.where)
            if self.gradient:
                subject.gradients(subject.cotangents(case))
            else:
                subject(case)
            yield from ()

        return Law("definition", "", "", compare)


Number = Callable[[int, int], int]
"""Draws an integer between two limits, both included."""
WAYS: tuple[Callable[[Number, Sizes, int], dict[str, Any]], ...] = (
    lambda n, s, far: {},
    lambda n, s, far: {"offsets": n(1, far)},
    lambda n, s, far: {"offsets": tuple(n(0, far) for _ in range(s.batch))},
    lambda n, s, far: {"positions": torch.tensor([n(0, far) for _ in range(s.tokens)])},
    lambda n, s, far: {"positions": torch.tensor([[n(0, far) for _ in range(s.tokens)] for _ in range(s.batch)])},
    lambda n, s, far: {"factor": 1.25},
    lambda n, s, far: {"interpolation": 4.0},
    lambda n, s, far: {"inverse": True},
    lambda n, s, far: {"lengths": tuple(n(0, 3) for _ in range(n(1, 4)))},
    lambda n, s, far: dict(zip(("lengths", "offsets"), zip(*[(n(0, 3), n(0, far)) for _ in range(n(1, 3))]))),  # noqa: B905
    lambda n, s, far: {"shard": (2, n(0, 1))},
    lambda n, s, far: {"offsets": -n(1, far)},
    lambda n, s, far: _axes(s, bool(n(0, 1))),
)  # fmt: skip
"""What a call can have besides its extents, the simplest first; the laws ask for nothing else."""


def _axes(sizes: Sizes, interleaved: bool) -> dict[str, Any]:
    section, positions = axes_positions(sizes)
    return {"mrope_section": section, "positions": positions, "mrope_interleaved": interleaved}


def smallest(fresh: Callable[[], Subject], sizes: Sizes, first: Seen) -> tuple[Call, Seen] | None:
    """Return the smallest wrong call that is found, and the input of it that is wrong; the same in every run.

    None without Hypothesis, or if no call is found.

    Args:
        fresh: returns the subject, without state of earlier calls.
        sizes: the sizes that the laws begin with.
        first: a wrong call; none larger than it and than ``sizes`` is made.
    """
    if find_spec("hypothesis") is None:
        return None
    from hypothesis import HealthCheck, Phase, find, settings

    known: dict[str, bool] = {}
    best: list[tuple[Call, Seen]] = []
    end = time.thread_time() + SECONDS

    def wrong(call: Call) -> bool:
        key = repr(call)
        if key not in known and len(known) < MOST_CALLS and time.thread_time() < end:
            found = [seen for seen in watch(call.law(), fresh(), call.sizes) if seen.wrong.any()]
            found = [seen for seen in found if seen.gradient == call.gradient]
            known[key] = bool(found)
            best.extend((call, one) for one in found[:1])
        return known.get(key, False)

    quiet = settings(
        derandomize=True, database=None, max_examples=MOST_CALLS, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    with suppress(Exception):  # no call is wrong, or the limits ended the search before Hypothesis repeated the last
        find(_calls(fresh(), sizes, first), wrong, settings=quiet, random=Random(0))
    return min(best, key=lambda one: one[0].cost, default=None)


def _calls(subject: Subject, sizes: Sizes, first: Seen):
    """Return a strategy of the calls that a subject may be able to take."""
    from hypothesis import strategies as st

    full = sizes.head_dim == sizes.rotary_dim
    features = [(n if full else 2 * n, n) for n in (2, 4, 8) if (n if full else 2 * n) < sizes.head_dim]
    features.append((sizes.head_dim, sizes.rotary_dim))
    dtypes = [*dict.fromkeys((subject.dtype, torch.bfloat16, torch.float16))]
    heads = [x.shape[2] for x in first.case.inputs]
    usual = (sizes.batch, sizes.tokens, sizes.q_heads, sizes.k_heads)
    largest = tuple(map(max, usual, (*first.case.shape, heads[0], heads[-1])))
    far = max(9, int(first.positions.max()))
    ways = [way for way in WAYS if subject.can(_case(subject, sizes, way(max, sizes, far)))]

    @st.composite
    def calls(draw) -> Call:
        def number(low: int, high: int) -> int:
            return draw(st.integers(low, high))

        way = draw(st.sampled_from(ways))
        head_dim, rotary_dim = draw(st.sampled_from(features))
        batch, tokens, q_heads, k_heads = (number(1, extent) for extent in largest)
        some = Sizes(batch, tokens, q_heads, k_heads, head_dim, rotary_dim)
        where = way(number, some, far)
        dtype = draw(st.sampled_from(dtypes if not where else dtypes[:1]))
        asked = subject.convention.differentiable and not where.keys() & {"positions", "inverse", "interpolation"}
        gradient = asked and draw(st.booleans())
        return Call(_fitting(some, where), gradient, where | ({} if dtype == subject.dtype else {"dtype": dtype}))

    return calls()


def _case(subject: Subject, sizes: Sizes, where: dict[str, Any]):
    return subject.draw(_fitting(sizes, where), **where)


def _fitting(sizes: Sizes, where: dict[str, Any]) -> Sizes:
    """Return the sizes with as many tokens as documents or shards have."""
    if "lengths" in where:
        return replace(sizes, batch=1, tokens=max(1, sum(where["lengths"])))
    return replace(sizes, tokens=sizes.tokens + sizes.tokens % 2) if "shard" in where else sizes
