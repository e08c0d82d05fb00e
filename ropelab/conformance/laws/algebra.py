"""The laws of the rotation itself: its definition, and the group laws, which need no reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Broken, NotApplicable
from ropelab.conformance.law import AXES, Comparison, against, against_truth, equal, law, names
from ropelab.conformance.tensors import copied
from ropelab.layout.pairing import join, pairs


@law(
    "Every pair of features rotates by the angle of its token's position, as in the definition.",
    r"\begin{pmatrix} y_0 \\ y_1 \end{pmatrix} ="
    r"\begin{pmatrix} \cos p\theta & -\sin p\theta \\ \sin p\theta & \cos p\theta \end{pmatrix}"
    r"\begin{pmatrix} x_0 \\ x_1 \end{pmatrix}",
)
def definition(subject, sizes):
    yield from against_truth(subject, subject.draw(sizes))
    if subject.convention.partial and sizes.rotary_dim < sizes.head_dim:
        yield from against_truth(subject, subject.draw(replace(sizes, rotary_dim=sizes.head_dim)))
    if subject.convention.looks_up:
        yield from against_truth(subject, subject.draw(sizes, spare_rows=0))  # the last token reads the last row
    if "factor" in subject.convention.expresses:
        yield from against_truth(subject, subject.draw(sizes, factor=1.25))
    orders = scattered(sizes)
    for positions in (torch.arange(sizes.tokens), orders[-1], orders):
        case = subject.draw(sizes, positions=positions)
        if not subject.can(case):
            continue
        try:
            comparisons = list(against_truth(subject, case))
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:  # a refusal is no wrong result
            whose = "that all sequences share" if positions.ndim == 1 else "for each sequence"
            yield f"refuses positions, or rows of the tables, {whose} ({type(refusal).__name__})"
        else:
            yield from comparisons


def scattered(sizes) -> torch.Tensor:
    """Return distinct positions out of order and with gaps, the largest beyond the sequence's end, int64 ``[B, S]``."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(4 * sizes.tokens, generator=generator)[: sizes.tokens] for _ in range(sizes.batch)]
    return torch.stack(rows)


@law(
    "The rotated features of a head keep their length, times the factor of the tables.",
    r"\lVert R x \rVert = \lVert x \rVert",
)
def isometry(subject, sizes):
    for factor in (1.0, 1.25) if "factor" in subject.convention.expresses else (1.0,):
        case = subject.draw(sizes, factor=factor)
        outputs = subject(case)
        for name, x, y, (_, bound) in zip(names(case), case.inputs, outputs, subject.expected(case), strict=True):
            before, after, bound = (_length(v[..., : sizes.rotary_dim]) for v in (exact(x), exact(y), bound))
            yield Comparison(f"length of {name}", after, factor * before, bound, case, AXES[:3])


def _length(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x * x).sum(-1))


@law("A token at position 0 is unchanged.", r"R(0) = I")
def identity(subject, sizes):
    case = subject.draw(replace(sizes, tokens=1))
    for name, x, y in zip(names(case), case.inputs, subject(case), strict=True):
        # A product with 1 is exact, and so is the sum with a product with 0.
        yield Comparison(name, exact(subject.as_input(y, sizes.rotary_dim)), exact(x), np.zeros(1), case)


@law(
    "The score of a query and a key depends only on the difference of their positions.",
    r"\langle R(m)\,q, R(n)\,k \rangle = \langle R(m-n)\,q, k \rangle",
)
def relative_position(subject, sizes):
    # Every position has the same query and the same key.
    cases = [subject.draw(sizes, seed=seed) for seed in (0, 1)]
    cases = [subject.with_inputs(c, [x[:, :1].expand_as(x) for x in c.inputs]) for c in cases]
    outputs: list[np.ndarray] = []
    expected: list[tuple[np.ndarray, np.ndarray]] = []
    for case in cases[: 1 if subject.convention.pair else 2]:
        outputs += map(exact, subject(case))
        expected += subject.expected(case)
    heads = min(y.shape[2] for y in outputs)
    q, k = (y[:, :, :heads] for y in outputs)
    (_, q_bound), (_, k_bound) = ((y[:, :, :heads], bound[:, :, :heads]) for y, bound in expected)
    scores = _scores(q, k)
    bound = _scores(abs(q), k_bound) + _scores(q_bound, abs(k)) + _scores(q_bound, k_bound)
    m, n = np.indices((sizes.tokens, sizes.tokens))
    # The expected score belongs to two positions with the same difference, one of them 0.
    near = (slice(None), np.maximum(m - n, 0), np.maximum(n - m, 0))
    axes = ("batch", "query token", "key token", "head")
    yield Comparison("score of q and k", scores, scores[near], bound + bound[near], cases[0], axes)


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the scores ``[B, S, S, H]`` of every query with every key."""
    return (q[:, :, None] * k[:, None]).sum(-1)


@law("Two rotations by an angle equal one rotation by twice the angle.", r"R(p)\,R(p) = R(2p)")
def composition(subject, sizes):
    case = subject.draw(sizes)
    again = subject.with_inputs(case, _back_in(subject, case, subject(case)))
    spread = subject.draw(replace(sizes, tokens=2 * sizes.tokens - 1))  # each token at twice its position
    inputs = [torch.zeros_like(x) for x in spread.inputs]
    for to, x in zip(inputs, case.inputs, strict=True):
        to[:, ::2] = x
    spread = subject.with_inputs(spread, inputs)
    bounds = (subject.expected(spread), subject.expected(again), _carried(subject, case))
    parts = zip(subject(spread), *bounds, strict=True)
    expected = [(exact(y)[:, ::2], once[:, ::2] + twice + carried) for y, (_, once), (_, twice), carried in parts]
    yield from against(again, subject(again), expected, "{} rotated twice")


@law("The rotation by minus the angle undoes the rotation.", r"R(-p)\,R(p) = I")
def inverse(subject, sizes):
    case = subject.draw(sizes)
    back = replace(subject.with_inputs(case, _back_in(subject, case, subject(case))), inverse=True)
    try:
        outputs = _back_in(subject, back, subject(back))
    except (Broken, NotApplicable):
        raise
    except Exception as refusal:
        if not subject.convention.negates:
            raise
        raise NotApplicable(f"refuses negative positions ({type(refusal).__name__})") from refusal
    bounds = subject.expected(back)
    if subject.out_layout != subject.layout:  # both members of a pair get the sum of their bounds
        bounds = [(y, _pair_sums(b, sizes.rotary_dim, subject.out_layout, subject.layout)) for y, b in bounds]
    parts = zip(case.inputs, bounds, _carried(subject, case), strict=True)
    expected = [(exact(x), bound + carried) for x, (_, bound), carried in parts]
    yield from against(back, outputs, expected, "{} rotated and rotated back")


def _back_in(subject, case, outputs):
    return [subject.as_input(y.detach(), case.rotary_dim) for y in outputs]


def _carried(subject, case) -> list[np.ndarray]:
    """Return how far the error of a first rotation may take the result of a second: the sum of a pair's errors."""
    bounds = (bound for _, bound in subject.expected(case))
    return [_pair_sums(bound, case.rotary_dim, subject.out_layout, subject.out_layout) for bound in bounds]


def _pair_sums(bound: np.ndarray, rotary_dim: int, source: str, target: str) -> np.ndarray:
    first, second = pairs(torch.from_numpy(bound[..., :rotary_dim].astype(float)), source)
    both = first + second
    summed = bound.copy()
    summed[..., :rotary_dim] = join(both, both, target).numpy()
    return summed


@law(
    "A feature contributes to itself and its declared partner, and to no other feature.",
    r"(R e_i)_j \ne 0 \iff j \in \{i, \pi(i)\}",
)
def layout(subject, sizes):
    batch, rotary_dim = sizes.rotary_dim, sizes.rotary_dim  # in row i of the batch only feature i is not 0
    case = subject.draw(replace(sizes, batch=batch, tokens=2))
    unit = torch.eye(batch, sizes.head_dim, dtype=subject.dtype, device=subject.device)[:, None, None]
    case = subject.with_inputs(case, [unit.expand_as(x) for x in case.inputs])
    plane = torch.arange(rotary_dim // 2)
    planes = [join(plane, plane, name) for name in (subject.layout, subject.out_layout)]
    linked = np.zeros((batch, 1, 1, sizes.head_dim))
    linked[:, 0, 0, :rotary_dim] = planes[0][:, None] == planes[1][None, :]
    for name, y in zip(names(case), subject(case), strict=True):
        reached = (exact(y) != 0)[:, 1:].astype(float)  # position 1, because position 0 changes nothing
        axes = ("feature of the input", "token - 1", "head", "feature")
        expected = np.broadcast_to(linked, reached.shape)
        yield Comparison(f"whether {name} is not 0", reached, expected, np.zeros(1), case, axes)


@law("Features beyond the rotated features pass unchanged, and so do their gradients.", r"(Rx)_j = x_j \quad (j \ge r)")
def tail(subject, sizes):
    if sizes.rotary_dim == sizes.head_dim:
        raise NotApplicable("all features rotate: declare rotary_dim to see the others")
    case = subject.draw(sizes)
    yield from equal(case, _tails(subject(case), sizes), _tails(case.inputs, sizes), "{} beyond rotary_dim")
    if subject.convention.differentiable:
        case = subject.cotangents(case)
        _, gradients = subject.gradients(case)
        what = "gradient of {} beyond rotary_dim"
        yield from equal(case, _tails(gradients, sizes), _tails(case.cotangents, sizes), what)


def _tails(tensors, sizes):
    return [x[..., sizes.rotary_dim :] for x in tensors]


@law("With a column of the tables for each feature, a feature turns by its own columns.",
     r"y_0 = c_0 x_0 - s_0 x_1,\; y_1 = c_1 x_1 + s_1 x_0")  # fmt: skip
def feature_columns(subject, sizes):
    case = subject.draw(sizes)
    told = told_by_feature(subject, case)
    yield from against(case, by_feature(subject, case), told, "{} with a column for each feature", truth=True)
    if subject.convention.differentiable:
        case = subject.cotangents(case)
        inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
        found = by_feature(subject, replace(case, inputs=inputs))
        if not all(y.requires_grad for y in found):
            raise Broken("the output has no grad_fn: autograd has no record of the function, and no gradient arrives")
        with subject.surroundings.theirs():
            made = torch.autograd.grad(found, inputs, tuple(map(copied, case.cotangents)), allow_unused=True)
        gradients = [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, made, strict=True)]
        told = told_by_feature(subject, case, transposed=True)
        yield from against(case, gradients, told, "gradient of {} with a column for each feature", truth=True)


def by_feature(subject, case):
    """Return the results where second members of pairs have columns of other frequencies."""
    kept = replace(case, inputs=tuple(map(copied, case.inputs)))
    return subject.call(kept, subject.convention.by_feature(subject, others(subject), kept))


def told_by_feature(subject, case, *, transposed: bool = False):
    """Return ``(value, bound)`` of each result of `by_feature`, or of the gradients for the cotangents of the case."""
    own, second = torch.tensor([True, False]).expand(case.rotary_dim // 2, 2).unbind(-1)
    first = join(own, second, subject.out_layout).numpy()
    first = np.concatenate((first, np.ones(case.inputs[0].shape[-1] - len(first), dtype=bool)))
    if not transposed:
        both = zip(subject.expected(case), others(subject).expected(case), strict=True)
        return [tuple(np.where(first, *part) for part in zip(*told, strict=True)) for told in both]
    parts = []
    for one, mask in ((subject, first), (others(subject), ~first)):
        cotangents = [exact(g) * mask for g in case.cotangents]
        parts.append(one.expected(case, cotangents, transposed=True))
    return [tuple(map(np.add, *both)) for both in zip(*parts, strict=True)]


def others(subject):
    """Return the subject with the frequencies that the columns of second members of pairs have."""
    return replace(subject, base=100 * subject.base)
