"""The laws of independence: a rotation treats each head and each sequence by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.law import Comparison, against, equal, law, names


@law("The result of a head depends neither on other heads nor on its index.", r"(Rx)_h = R x_h")
def heads_independent(subject, sizes):
    yield from _independent(subject, sizes, axis=2)


@law("The result of a sequence depends neither on other sequences nor on its index.", r"(Rx)_b = R x_b")
def batch_independent(subject, sizes):
    yield from _independent(subject, sizes, axis=0)


def _independent(subject, sizes, axis):
    case = subject.draw(sizes)
    other = subject.draw(sizes, seed=2)
    inputs = []
    for x, new in zip(case.inputs, other.inputs, strict=True):
        x = x.clone()
        x.select(axis, -1).copy_(new.select(axis, -1))
        inputs.append(x)
    changed = subject.with_inputs(case, inputs)
    before, after = ([_but_last(y, axis) for y in subject(c)] for c in (case, changed))
    part = {0: "sequence", 2: "head"}[axis]
    yield from equal(changed, after, before, f"{{}} when only the last {part} changed")

    alike = subject.with_inputs(case, [x.narrow(axis, 0, 1).expand_as(x) for x in case.inputs])
    for name, y, (_, bound) in zip(names(case), subject(alike), subject.expected(alike), strict=True):
        first = exact(y.narrow(axis, 0, 1))
        first = np.broadcast_to(first, y.shape)
        yield Comparison(f"{name} with the same numbers in every {part}", exact(y), first, 2 * bound, alike)


def _but_last(y: torch.Tensor, axis: int) -> torch.Tensor:
    return y.narrow(axis, 0, y.shape[axis] - 1)


@law("The result of q does not depend on k, and the result of k does not depend on q.", r"R(q, k) = (Rq, Rk)")
def keys_independent(subject, sizes):
    subject.require_pair()
    case, other = subject.draw(sizes), subject.draw(sizes, seed=2)
    both = subject(case)
    for i, name in enumerate(("q", "k")):
        inputs = [x if i == j else y for j, (x, y) in enumerate(zip(case.inputs, other.inputs, strict=True))]
        changed = replace(case, inputs=tuple(inputs))
        actual = exact(subject(changed)[i])
        yield Comparison(f"{name} when only the other input changed", actual, exact(both[i]), np.zeros(1), changed)


@law("A head alone has the same result as among other heads.", r"R(x_h) = (Rx)_h")
def single_head(subject, sizes):
    case = subject.draw(sizes)
    alone = subject.with_inputs(case, [x[:, :, :1] for x in case.inputs])
    bounds = (2 * bound for _, bound in subject.expected(alone))
    expected = [(exact(y)[:, :, :1], bound) for y, bound in zip(subject(case), bounds, strict=True)]
    yield from against(alone, subject(alone), expected, "{} of a single head")
