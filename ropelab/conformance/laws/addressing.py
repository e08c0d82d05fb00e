"""The laws of positions: offsets, decoding, packed documents, context parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Broken, Case, NotApplicable, Noted, Sizes, rank_positions
from ropelab.conformance.law import Comparison, against, law, names
from ropelab.conformance.words import said
from ropelab.layout.pairing import join, pairs


def _applicable(subject, cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the cases that the subject can express; raise NotApplicable for the first case if there is none."""
    cases = list(cases)
    found = [case for case in cases if subject.can(case)]
    if not found:
        subject.arguments(cases[0])
    yield from found


@law("Token i of a sequence that starts at position m has position m + i.", r"p_i = m + i")
def offsets(subject, sizes):
    below = -sizes.tokens - 2
    starts = (3, sizes.tokens + 2, tuple(5 * i for i in range(sizes.batch)), below)
    for case in _applicable(subject, (subject.draw(sizes, offsets=start) for start in starts)):
        expected = _mirrored if case.offsets == below else _among_more
        try:
            outputs = subject(case)
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if case.offsets != below or not subject.convention.own_tables:
                raise
            yield f"refuses negative positions ({type(refusal).__name__})"
            continue
        yield from against(case, outputs, expected(subject, case, sizes))


def _mirrored(subject, case: Case, sizes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the results at negative positions, from results at positive positions: ``R(-p) = F R(p) F``.

    The reflection ``F`` negates the second member of every pair.
    """
    inputs = [_reflected(x.flip(1), sizes, subject.layout) for x in case.inputs]
    outputs = subject(subject.with_inputs(replace(case, offsets=3), inputs))  # |p| of the last token is 3
    outputs = (_reflected(y, sizes, subject.out_layout).flip(1) for y in outputs)
    return [(exact(y), 2 * bound) for y, (_, bound) in zip(outputs, subject.expected(case), strict=True)]


def _reflected(x: torch.Tensor, sizes, layout: str) -> torch.Tensor:
    """Return ``x`` with the second member of every pair negated."""
    x = x.clone()
    pairs(x[..., : sizes.rotary_dim], layout)[1].neg_()
    return x


def _among_more(subject, case: Case, sizes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the results of the tokens in longer sequences that start at 0, with zeros before and after the tokens."""
    positions = case.token_positions()
    longer = subject.draw(replace(sizes, tokens=int(positions.max()) + 1))
    rows = torch.arange(sizes.batch)[:, None]
    inputs = []
    for x in case.inputs:
        more = x.new_zeros(sizes.batch, longer.shape[1], *x.shape[2:])
        more[rows, positions] = x
        inputs.append(more)
    outputs = subject(subject.with_inputs(longer, inputs))
    parts = zip(outputs, subject.expected(case), strict=True)
    return [(exact(y[rows, positions]), 2 * bound) for y, (_, bound) in parts]


def axes_positions(sizes: Sizes) -> tuple[tuple[int, int, int], torch.Tensor]:
    """Return the number of pairs of each of three axes, all different if possible, and positions ``[3, B, S]``."""
    pairs_of_head = sizes.rotary_dim // 2
    height = pairs_of_head // 3
    width = height - (height > 1)
    places = torch.arange(sizes.batch)[:, None] + torch.arange(sizes.tokens)
    return (pairs_of_head - height - width, height, width), torch.stack((places + 1, 2 * places, 3 * places + 2))


@law("With positions along several axes, each pair turns as along its axis alone.", r"R(p_1, p_2)_i = R(p_{a(i)})_i")
def axes(subject, sizes):
    section, image = axes_positions(sizes)
    text = torch.arange(sizes.tokens).expand_as(image)
    after_text = torch.where(text < sizes.tokens // 2, text, image)  # text has one position along all axes
    for positions, interleaved in ((image, False), (image, True), (after_text, False)):
        case = subject.draw(sizes, positions=positions, mrope_section=section, mrope_interleaved=interleaved)
        outputs, bounds = subject(case), [bound for _, bound in subject.expected(case)]
        axis = torch.tensor(case.axes)
        features = join(axis, axis, subject.out_layout).numpy()
        expected = [(np.zeros_like(bound), 2 * bound) for bound in bounds]
        for i, along in enumerate(positions):
            alone = subject(replace(case, positions=along, mrope_section=None, mrope_interleaved=False))
            for (right, _), y in zip(expected, map(exact, alone), strict=True):
                right[..., : sizes.rotary_dim][..., features == i] = y[..., : sizes.rotary_dim][..., features == i]
                right[..., sizes.rotary_dim :] = y[..., sizes.rotary_dim :]
        yield from against(case, outputs, expected)


@law("Positions are divided by the number that the caller passes for it, such as a scale of the rotation.",
     r"R_s(p) = R(p / s)")  # fmt: skip
def interpolation(subject, sizes):
    scaled = subject.draw(sizes, positions=4 * torch.arange(sizes.tokens) + 1, interpolation=4.0)
    yield from against(scaled, subject(scaled), subject.expected(scaled), "{} with positions divided by 4", truth=True)


@law("Decoding token by token gives what all tokens give at once.", r"R(x_{1..n})_i = R_{i}(x_i)")
def decode(subject, sizes):
    case = subject.draw(sizes)
    at_once = [(exact(y), 2 * bound) for y, (_, bound) in zip(subject(case), subject.expected(case), strict=True)]
    for i in reversed(range(sizes.tokens)):  # position 0 comes last: every convention has it, but it tests no decoding
        token = subject.with_inputs(case, [x[:, i : i + 1] for x in case.inputs])
        expected = [(y[:, i : i + 1], bound[:, i : i + 1]) for y, bound in at_once]
        for step in _applicable(subject, (replace(token, offsets=start) for start in (i, (i,) * sizes.batch))):
            yield from against(step, subject(step), expected, f"{{}} of token {i} alone")


@law("A packed document has the same result as the document alone.", r"R(x_1 \Vert x_2) = R x_1 \Vert R x_2")
def packed(subject, sizes):
    lengths = (2, 1, 1, sizes.tokens, 3)
    plain = _packed(subject, sizes, lengths)
    yield from _documents_alone(subject, plain)
    moved = replace(plain, offsets=(4, 0, 9, 2, 1))
    if subject.can(moved):
        yield from _documents_alone(subject, moved)


def _packed(subject, sizes, lengths, padding=0, **where) -> Case:
    tokens = sum(lengths) // where.get("shard", (1, 0))[0] + padding
    case = subject.draw(replace(sizes, batch=1, tokens=tokens), lengths=lengths, **where)
    subject.arguments(case)  # raises NotApplicable before the law calls the function
    return case


def _documents_alone(subject, case: Case) -> Iterator[Comparison]:
    lengths = case.lengths or ()
    offsets = case.offsets if isinstance(case.offsets, tuple) else (case.offsets,) * len(lengths)
    results, begin = [], 0
    for length, offset in zip(lengths, offsets, strict=True):
        inputs = [x[:, begin : begin + length] for x in case.inputs]
        alone = replace(case, inputs=tuple(inputs), lengths=None, offsets=offset)
        results.append([exact(y) for y in subject(subject.with_inputs(alone, inputs))])
        begin += length
    documents = (np.concatenate(ys, axis=1) for ys in zip(*results, strict=True))
    expected = [(y, 2 * bound) for y, (_, bound) in zip(documents, subject.expected(case), strict=True)]
    yield from against(case, subject(case), expected, "{} of packed documents")


@law("Empty documents change nothing.", r"R(x_1 \Vert \varnothing \Vert x_2) = R(x_1 \Vert x_2)")
def zero_length(subject, sizes):
    without = _packed(subject, sizes, (2, 1, sizes.tokens))
    bounds = [2 * bound for _, bound in subject.expected(without)]
    expected = list(zip(map(exact, subject(without)), bounds, strict=True))
    for lengths in ((0, 2, 1, sizes.tokens), (2, 1, sizes.tokens, 0), (0, 0, 2, 0, 0, 1, sizes.tokens, 0)):
        case = replace(without, lengths=lengths)
        yield from against(case, subject(case), expected, "{} with empty documents")


@law("Rows past the last document are zeros or unchanged, and disturb no other.", r"R x_i \in \{0, x_i\}")
def rows_past_end(subject, sizes):
    lengths = (2, sizes.tokens)
    case = subject.cotangents(_packed(subject, sizes, lengths, padding=3))
    used = sum(lengths)
    try:
        subject(case)
    except (Broken, NotApplicable):
        raise
    except Exception as refusal:
        raise Noted(f"it refuses a packed buffer that is longer than cu_seqlens ({said(refusal)})") from refusal
    inside = subject.with_inputs(case, [x[:, :used] for x in case.inputs])
    both = [(subject(case), subject(inside), subject.expected(case), case.inputs, "{}")]
    if subject.convention.differentiable:
        truth = subject.expected(case, case.cotangents, transposed=True)
        inside = replace(inside, cotangents=tuple(g[:, :used].contiguous() for g in case.cotangents))
        gradients = (subject.gradients(c)[1] for c in (case, inside))
        both.append((*gradients, truth, case.cotangents, "gradient of {}"))
    for actual, within, truth, given, what in both:
        for name, y, part, (_, bound), x in zip(names(case), actual, within, truth, given, strict=True):
            y, part, past = exact(y), exact(part), exact(x)[:, used:]
            unchanged = np.array_equal(y[:, used:], past)
            if subject.convention.ends_with_documents and not unchanged and y[:, used:].any():
                yield Comparison(what.format(name), y[:, :used], part, 2 * bound[:, :used], case)
                raise Noted("it leaves other numbers in rows past the last document")
            expected = np.concatenate((part, past if unchanged else np.zeros_like(past)), axis=1)
            yield Comparison(what.format(name), y, expected, 2 * bound, case)


@law("The result of a context-parallel shard is part of the whole result.", r"R(x)_{\text{rank}} = R(x_{\text{rank}})")
def context_parallel(subject, sizes):
    size = 2
    wholes = (
        subject.draw(replace(sizes, tokens=4 * size)),
        subject.draw(replace(sizes, batch=1, tokens=12 * size), lengths=(2 * size, 8 * size, 2 * size)),
    )
    first_ranks = [_shard(subject, whole, size, rank=0) for whole in wholes]
    applicable = list(_applicable(subject, first_ranks))
    for whole, first in zip(wholes, first_ranks, strict=True):
        if first not in applicable:
            continue
        outputs, bounds = subject(whole), [2 * bound for _, bound in subject.expected(whole)]
        for rank in range(size):
            rows = _rows(whole, size, rank)
            expected = [(exact(y)[:, rows], bound[:, rows]) for y, bound in zip(outputs, bounds, strict=True)]
            case = _shard(subject, whole, size, rank)
            yield from against(case, subject(case), expected, f"{{}} on rank {rank}")


def _shard(subject, whole: Case, size: int, rank: int) -> Case:
    rows = _rows(whole, size, rank)
    return subject.with_inputs(replace(whole, shard=(size, rank)), [x[:, rows] for x in whole.inputs])


def _rows(whole: Case, size: int, rank: int) -> torch.Tensor:
    """Return the indices of the rank's tokens in the whole sequence."""
    lengths = whole.lengths or (whole.shape[1],)
    starts = np.cumsum((0, *lengths[:-1]))
    return torch.cat([int(start) + rank_positions(n, size, rank) for start, n in zip(starts, lengths, strict=True)])


@law("Every sequence of a batch has its own positions.", r"p_{bi} \ne p_{b'i}")
def positions_per_batch(subject, sizes):
    grid = torch.arange(sizes.batch)[:, None] * 7 + torch.arange(sizes.tokens)
    shuffled = grid.flip(1) + torch.arange(sizes.tokens) % 3
    cases = [subject.draw(sizes, positions=shuffled), subject.draw(sizes, offsets=tuple(grid[:, 0].tolist()))]
    for case in _applicable(subject, cases):
        results = []
        for b in range(sizes.batch):
            row = replace(case, positions=case.positions[b : b + 1]) if case.positions is not None else case
            row = replace(row, offsets=case.offsets[b : b + 1]) if isinstance(case.offsets, tuple) else row
            results.append([exact(y) for y in subject(subject.with_inputs(row, [x[b : b + 1] for x in case.inputs]))])
        alone = (np.concatenate(ys) for ys in zip(*results, strict=True))
        expected = [(y, 2 * bound) for y, (_, bound) in zip(alone, subject.expected(case), strict=True)]
        yield from against(case, subject(case), expected, "{} of sequences at positions of their own")


@law(
    "A token has the same bits alone, among others, packed, decoded and in a context-parallel shard.",
    r"R(x)_i \equiv R_i(x_i)",
    by_default=False,
)
def token_bits(subject, sizes):
    reasons = []
    for same in (decode, packed, context_parallel):
        try:
            comparisons = list(same.compare(subject, sizes))
        except NotApplicable as reason:
            reasons.append(f"{same.name} is left out: {reason}")
        else:
            for found in comparisons:
                yield found if isinstance(found, str) else replace(found, bound=np.zeros(1))
    if len(reasons) == 3:
        raise NotApplicable("; ".join(reasons))
    yield from reasons
