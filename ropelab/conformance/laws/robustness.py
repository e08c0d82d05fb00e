"""The laws at the ends of the range: no elements, very many elements, calls that make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from ropelab.conformance.case import Broken, Case, NotApplicable, Noted
from ropelab.conformance.convention import accepts
from ropelab.conformance.law import Comparison, against, against_truth, counted, law, names
from ropelab.conformance.laws.numerics import MOST_CALLS, require_few
from ropelab.conformance.surroundings import filling, set_filling
from ropelab.conformance.words import said
from ropelab.layout.seq_format import to_bshd

MOST_ROWS = 65_536
"""The number of heads of tokens up to which a long call has all heads."""


@law("Nothing in, nothing out.", r"R \varnothing = \varnothing")
def empty(subject, sizes):
    cases = [subject.draw(replace(sizes, tokens=0)), subject.draw(replace(sizes, batch=0))]
    cases.append(subject.draw(replace(sizes, batch=1, tokens=0), lengths=(0,)))
    for case in filter(subject.can, cases):
        try:
            outputs = subject(case)
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:  # a function may document that it takes no empty tensors
            raise Noted(f"it refuses tensors without elements ({said(refusal)})") from refusal
        for name, y in zip(names(case), outputs, strict=True):
            yield counted(case, f"elements of {name}", y.numel())


@law("The definition holds for other extents: equal axes, odd numbers of heads and of pairs, 128 tokens, 128 features.",
     r"y = R x \text{ for all } B, S, H, r")  # fmt: skip
def extents(subject, sizes):
    for other in (
        replace(sizes, batch=sizes.tokens),  # axes that are equal cannot be told apart by their extents
        replace(sizes, tokens=sizes.q_heads),
        replace(sizes, tokens=sizes.k_heads),
        replace(sizes, batch=1, tokens=128, q_heads=1, k_heads=1),
    ):
        yield from against_truth(subject, subject.draw(other))
    wide = wide_heads(subject, sizes)
    if wide.rotary_dim != sizes.rotary_dim < sizes.head_dim and _turns_a_number(subject, wide, sizes.rotary_dim):
        wide = replace(wide, rotary_dim=sizes.rotary_dim)
    for other in (three_heads(sizes), odd_pairs(subject, sizes), wide):
        case = subject.draw(other)
        try:
            comparisons = list(against_truth(subject, case))
        except NotApplicable:
            raise
        except Exception as refusal:  # a function may know certain heads only
            if isinstance(refusal, Broken) and not (other is wide and subject.convention.own_tables):
                raise
            yield f"refuses {other} ({type(refusal).__name__})"
            continue
        yield from comparisons


@law("One token more than a threshold changes no result: some tokens of long sequences are the definition.",
     r"y_t = R_t x_t \text{ for all } S")  # fmt: skip
def token_counts(subject, sizes):
    for count in sizes.token_counts:
        at = sampled(count)
        try:
            case = subject.draw(long_call(subject, sizes, count + 1))
            truth = subject.expected(replace(case, inputs=tuple(x[:, at] for x in case.inputs), positions=at))
            found = [y[:, at] for y in subject(case)]
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if not subject.convention.own_tables:
                raise
            yield f"refuses {count + 1} tokens ({type(refusal).__name__})"  # its tables may end before
            return
        yield from against(case, found, truth, truth=True, tokens=at.tolist())


def sampled(count: int) -> torch.Tensor:
    """Return the tokens near both ends and near powers of two of ``count + 1`` tokens, int64 ``[K]``."""
    near = (2**power + step for power in range(4, 23) for step in (-1, 0, 1))
    return torch.tensor(sorted({*range(min(count, 4)), *(t for t in near if t <= count), count - 1, count}))


def three_heads(sizes):
    """Return sizes with an odd number of heads, for q and k in turn in groups of three."""
    return replace(sizes, q_heads=9 if sizes.q_heads > sizes.k_heads else 3, k_heads=3)


def odd_pairs(subject, sizes):
    """Return sizes with an odd number of pairs, where the width of heads or tables tells how many rotate."""
    rotary_dim = sizes.rotary_dim - 2 if sizes.rotary_dim % 4 == 0 else sizes.rotary_dim
    if sizes.rotary_dim < sizes.head_dim:
        return replace(sizes, rotary_dim=rotary_dim) if subject.convention.partial else sizes
    made = isinstance(subject.function, torch.nn.Module)  # for heads of one size
    return sizes if made else replace(sizes, head_dim=rotary_dim, rotary_dim=rotary_dim)


def _turns_a_number(subject, wide, rotary_dim: int) -> bool:
    """Return whether a function that is not told how many features rotate turns a number of them, not a share."""
    if not subject.convention.own_tables or subject.convention.partial or accepts(subject.function, "rotary_dim"):
        return False
    try:
        found = list(against_truth(subject, subject.draw(replace(wide, rotary_dim=rotary_dim))))
    except Exception:  # the law says how it deviates from a share
        return False
    return all((one.excess <= 1).all() for one in found)


def wide_heads(subject, sizes):
    """Return sizes with heads of 128 features, which a kernel may turn in several blocks of features."""
    if isinstance(subject.function, torch.nn.Module):  # for heads of one size
        return sizes
    rotary_dim = 128 if sizes.rotary_dim == sizes.head_dim else 96
    return replace(sizes, batch=1, q_heads=2, k_heads=1, head_dim=128, rotary_dim=rotary_dim)


def long_call(subject, sizes, tokens, limit=MOST_CALLS // 10):
    """Return sizes with a number of tokens: all heads, or one head where all are too many, or too many calls in Python.

    Raises:
        NotApplicable: a call with one head would make more than ``limit`` calls in Python.
    """
    every = replace(sizes, batch=1, tokens=tokens)
    if tokens * sizes.q_heads <= MOST_ROWS:
        with suppress(NotApplicable):
            require_few(subject, every, limit)
            return every
    one = replace(every, q_heads=1, k_heads=1)
    require_few(subject, one, limit)
    return one


@law("Calls that make no sense raise an error.", r"R x \text{ is defined or refused}")
def bad_input(subject, sizes):
    case = subject.draw(replace(sizes, tokens=max(sizes.tokens, 3)))  # positions of a single token would broadcast
    for what, arguments in subject.convention.bad(subject, case):
        try:
            subject.call(case, arguments)
        except Exception:  # any exception will do
            continue
        raise Noted(f"it accepts {what}")
    yield counted(case, "bad calls accepted")


@law("Tensors with more elements than int32 counts, or more tokens than a grid axis has, have right results.",
     r"y = R x \text{ beyond } 2^{31}", by_default=False)  # fmt: skip
def huge(subject, sizes):
    tried = 0
    for make in (_sequences_far_apart, _many_tokens):
        try:
            for comparison in make(subject, sizes):
                tried += 1
                yield comparison
        except NotApplicable:
            if make is _many_tokens and not tried:
                raise
    if subject.device.startswith("cuda"):
        yield from _beyond_int32(subject, sizes)


def _sequences_far_apart(subject, sizes) -> Iterator[Comparison]:
    """Compare three sequences 2**30 elements apart. On a CPU the untouched memory between them costs nothing."""
    case = subject.draw(replace(sizes, batch=3), dtype=torch.bfloat16)
    far = replace(case, inputs=tuple(map(far_apart, case.inputs)))
    if subject.in_place:
        subject.call(far, subject.arguments(far))
        yield from against(case, far.inputs, subject.expected(case), truth=True)
    else:
        yield from against(case, subject(far), subject.expected(case), truth=True)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers ``[B, ...]`` with a stride of ``2**30`` elements between the sequences."""
    with _not_filled():
        memory = torch.empty((len(x) - 1) * 2**30 + x[0].numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (2**30, *x[0].contiguous().stride())).copy_(x)


def _many_tokens(subject, sizes) -> Iterator[Comparison]:
    many = replace(sizes, batch=1, tokens=65_537, q_heads=1, k_heads=1)
    require_few(subject, many)
    yield from against_truth(subject, subject.draw(many))


def _beyond_int32(subject, sizes, elements: int = 2**31) -> Iterator[Comparison]:
    """Compare the last tokens of contiguous tensors with more than ``elements`` elements."""
    tokens = elements // (64 * sizes.head_dim) + 16
    shape = {"b": 1, "s": tokens, "h": 64, "d": sizes.head_dim}
    case = subject.draw(replace(sizes, batch=1, tokens=16), dtype=torch.bfloat16)
    x = torch.randn([shape[axis] for axis in subject.seq_format], dtype=torch.bfloat16, device=subject.device)
    k = (subject.draw(replace(sizes, batch=1, tokens=tokens, q_heads=1, k_heads=1), dtype=x.dtype).inputs[-1],)
    large = Case((to_bshd(x, subject.seq_format), *k[: len(case.inputs) - 1]), sizes.rotary_dim)
    last = [x[:, -16:].clone() for x in large.inputs]
    end = replace(case, inputs=tuple(last), positions=torch.arange(tokens - 16, tokens))
    found = [y[:, -16:] for y in subject.call(large, subject.arguments(large))]
    yield from against(end, found, subject.expected(end), truth=True)


@contextmanager
def _not_filled() -> Iterator[None]:
    fill = filling()
    set_filling(False)
    try:
        yield
    finally:
        set_filling(fill)
