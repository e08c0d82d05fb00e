"""The laws of operators that rotate and write a paged cache.

An operator normalizes the heads of q and k (where it has weights), rotates them, and writes k and v into the slots of
the tokens. The formulas write N for the norm, R for the rotation and Q for the rounding to the dtype of a cache, and
C[s] for the slot s of the caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab import apply_qk_norm_rope, apply_rope
from ropelab.block_scales import TMA_SCALES
from ropelab.conformance.cache.block_scales import BlockScales, RopeAndQuantize, parts
from ropelab.conformance.cache.case import CacheCase, arranged, bit_numbers, bits, numbers
from ropelab.conformance.cache.convention import ROWS, Written
from ropelab.conformance.cache.conventions import UNWRITTEN
from ropelab.conformance.cache.subject import SCALES, CacheSubject
from ropelab.conformance.cache_bounds import row_scale
from ropelab.conformance.case import Broken, NotApplicable
from ropelab.conformance.convention import call
from ropelab.conformance.law import Comparison, Law, law
from ropelab.conformance.laws.robustness import long_call, sampled
from ropelab.kernels.float8 import FLOAT8_DTYPES, scale_of_rows, to_float8
from ropelab.layout.pairing import pairs

AXES = ("token", "head", "feature")
_EQUAL = np.zeros(1)


# ---------------------------------------------------------------------------------------------------- the definition


@law("q, and k and v in the slots of their tokens, are the definition within the derived bound.",
     r"C[s_t] = Q\,(R_{p_t} N k_t,\ v_t),\quad q'_t = R_{p_t} N q_t")  # fmt: skip
def definition(subject, sizes):
    yield from _against_truth(subject, subject.draw(sizes))
    if subject.convention.optional_norm:
        yield from _against_truth(subject, subject.draw(sizes, norm=False))
    if subject.convention.offset:
        yield from _against_truth(subject, subject.draw(sizes, weight_offset=1.0), what=" with 1 + w for the weights")
    if subject.convention.widths_differ:
        try:
            yield from _against_truth(subject, subject.draw(sizes, wider=8), what=" with heads of v of another width")
        except Broken:
            raise
        except Exception as refusal:  # a refusal writes nothing that could be wrong
            yield f"refuses heads of v of another width than heads of k ({type(refusal).__name__})"
    if subject.convention.own_angles:
        yield from _against_truth(subject, with_yarn(subject.draw(sizes)), what=" with YaRN's frequencies")


@law("One token more than a threshold changes no result: some tokens of long calls are the definition.",
     r"C[s_t] = Q\,(R_{p_t} N k_t,\ v_t),\quad q'_t = R_{p_t} N q_t \text{ for all } T")  # fmt: skip
def token_counts(subject, sizes):
    for count in sizes.token_counts:
        case, at = subject.draw(long_call(subject, sizes, count + 1)), sampled(count)
        few, written = _some_tokens(case, subject(case), at)
        for comparison in _against_truth(subject, few, written):
            tokens = at if len(comparison.actual) == len(at) else at[few.live]
            yield replace(comparison, case=case, tokens=tokens.tolist())


def _some_tokens(case: CacheCase, written: Written, at: torch.Tensor) -> tuple[CacheCase, Written]:
    """Return a call and its results as if it had the tokens with the numbers ``at`` only."""
    few = replace(case, inputs=tuple(x[:, at] for x in case.inputs), positions=case.token_positions()[0][at],
                  slots=case.slots[at])  # fmt: skip
    q, k, v = (None if y is None else y[at] for y in (written.q, written.k, written.v))
    scales = None if written.scales is None else (written.scales[0][at], *written.scales[1:])
    return few, Written(q, k, written.memory, v, scales)


def _made_scales(case: CacheCase, scales: tuple[torch.Tensor, ...], which: int) -> np.ndarray:
    """Return the scales of q ``[T, H]``, or those in the slots of the tokens with a slot ``[n, H]``."""
    return numbers(scales[which].flatten(0, 1)[case.slots[case.slots >= 0]] if which else scales[0])


def with_yarn(case: CacheCase) -> CacheCase:
    """Return the case with YaRN's frequencies; the ends of the ramp lie between pairs, as with ``truncate=False``."""
    return replace(case, yarn=(4.0, 0.75, max(case.rotary_dim / 2 - 1.25, 2.25), 1.25))


@law("A cache in 8-bit floats holds the values divided by their scales, rounded, within the derived bound.",
     r"C[s_t] = \mathrm{fl}_8(\mathrm{clamp}(R_{p_t} N k_t / \sigma_k))")  # fmt: skip
def float8(subject, sizes):
    if isinstance(subject.convention, BlockScales):
        case = subject.draw(sizes)
        yield from _against_truth(subject, of_every_size(case), what=" of every size")
        return
    for dtype in FLOAT8_DTYPES:
        name = _name(dtype)
        case = subject.draw(sizes, cache_dtype=dtype)
        yield from _against_truth(subject, case, what=f" in {name}")
        if dtype == FLOAT8_DTYPES[0] and not subject.convention.turns_cached:
            yield from _against_truth(subject, beyond(case), what=f" in {name} beyond the largest finite number")


def beyond(case: CacheCase) -> CacheCase:
    """Return the case with scales so small that the largest quotients are beyond the largest finite number."""
    q, k, v = (scale * 2.0**-15 for scale in case.scales)
    return replace(case, scales=(q, k, v))


def of_every_size(case: CacheCase) -> CacheCase:
    """Return the case with heads of k from zeros and tiny numbers to large ones."""
    q, k, v = case.inputs
    power = torch.arange(case.tokens, device=k.device) % 12 - 6
    size = torch.where(power == -6, 0, 4.0**power).to(k.dtype)
    return replace(case, inputs=(q, k * size[None, :, None, None], v))


def _against_truth(
    subject: CacheSubject, case: CacheCase, written: Written | None = None, *, what: str = ""
) -> Iterator[Comparison]:
    written = written or _offered(subject, case)
    live = case.live.numpy()
    q, k, v = subject.expected(case)
    tokens = live if subject.convention.whole_tokens else np.ones_like(live)
    if isinstance(subject.convention, BlockScales):
        if written.q is not None:
            yield Comparison("q" + what, numbers(written.q), *q, case, AXES, truth=True)
        for name, stored, truth in parts(subject, case, written.memory):
            yield Comparison(name + what, stored, *truth, case, ("token", "head", "element"), truth=True)
        return
    for name, which, found, (value, bound), kept in (
        ("q", 0, written.q, q, tokens),
        ("k", 1, written.k, k, tokens),
        ("stored k", 1, case.rows(written.memory)[0], k, live),
        ("stored v", 2, case.rows(written.memory)[1], v, live),
    ):
        if found is None:
            continue
        actual = numbers(found)[kept] if name in ("q", "k") else numbers(found)
        scales = written.scales and _made_scales(case, written.scales, which)[kept if which == 0 else ...]
        value, bound = subject.stored(case, which, value[kept], bound[kept], found.dtype, scales)
        yield Comparison(name + what, actual, value, bound, case, AXES, truth=True)


@law("The score of a rotated q and a stored k depends on the distance of their positions only.",
     r"\langle q'_t, C_k[s_u] \rangle = f(p_t - p_u)")  # fmt: skip
def relative_position(subject, sizes):
    _needs_queries(subject)
    if isinstance(subject.convention, BlockScales):
        raise NotApplicable("8-bit floats round the scores too much")
    case = _pairs_alike(subject, _live(subject, subject.draw(sizes, skipped=False)))
    near = torch.arange(case.tokens) % (ROWS // 2)
    scores = []
    for shift in (0, ROWS // 2 - 1):
        moved = replace(case, positions=near + shift)
        written = subject(moved)
        (q, q_bound), (k, k_bound), _ = subject.expected(moved)
        q, q_bound = subject.stored(moved, 0, q, q_bound, written.q.dtype)
        k, k_bound = subject.stored(moved, 1, k, k_bound, moved.memory.dtype)
        if subject.convention.latent:
            k, k_bound = (x.repeat(q.shape[1], 1) for x in (k, k_bound))
        heads = np.arange(q.shape[1]) * k.shape[1] // q.shape[1]
        k, k_bound = k[:, heads], k_bound[:, heads]
        stored = numbers(case.rows(written.memory)[0])
        stored = np.repeat(stored, q.shape[1], 1) if subject.convention.latent else stored[:, heads]
        found = np.einsum("thd,uhd->tuh", numbers(written.q), stored)
        bound = (
            np.einsum("thd,uhd->tuh", abs(q) + q_bound, k_bound) + np.einsum("thd,uhd->tuh", q_bound, abs(k))
        )  # fmt: skip
        scores.append((found, bound, moved))
    (first, first_bound, _), (second, second_bound, moved) = scores
    if moved.memory.dtype in FLOAT8_DTYPES:
        raise NotApplicable("8-bit floats round the scores too much")
    axes = ("token", "key", "head")
    yield Comparison("scores at shifted positions", second, first, first_bound + second_bound, moved, axes)


def _pairs_alike(subject: CacheSubject, case: CacheCase) -> CacheCase:
    """Return the case, for a norm after the rotation with one weight for both features of every pair.

    With other weights such a norm makes scores depend on the positions themselves.
    """
    if not case.norm_last:
        return case
    weights = tuple(weight.clone() for weight in case.weights)
    for weight in weights:
        heads = weight.view(-1, case.inputs[0].shape[-1])
        first, second = pairs(heads[:, : case.rotary_dim], subject.layout)
        second.copy_(first)
    return replace(case, weights=weights)


@law("The scale that the operator makes of a head of a token is its largest magnitude over the largest 8-bit float.",
     r"\sigma_{t,h} = \max_d |x_{t,h,d}| / \mathrm{max}_8")  # fmt: skip
def row_scales(subject, sizes):
    if not subject.convention.row_scales:
        raise NotApplicable(f"{subject.convention.name}: the scales are given")
    for dtype in FLOAT8_DTYPES:
        case = subject.draw(sizes, cache_dtype=dtype)
        written, live = subject(case), case.live.numpy()
        for name, which, (value, bound) in zip("qkv", range(3), subject.expected(case), strict=True):
            kept = live if which else slice(None)
            scale, error = row_scale(value[kept], bound[kept], dtype)
            yield Comparison(
                f"scales of {name} in {_name(dtype)}", _made_scales(case, written.scales, which), scale, error, case,
                AXES[:2], truth=True,
            )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- slots


@law("The memory of the caches is unchanged outside of the slots of the tokens.",
     r"C'[s] = C[s] \text{ for } s \notin \{s_t\}")  # fmt: skip
def other_slots_unchanged(subject, sizes):
    for order in subject.convention.orders:
        case = subject.draw(sizes, order=order)
        yield from _unnamed(subject, case, f"elements that no token names, {order}")
    if not subject.convention.float8_only:
        case = subject.draw(sizes, cache_dtype=FLOAT8_DTYPES[0])
        _offered(subject, case)
        yield from _unnamed(subject, case, "bytes that no token names")


@law("A token with a negative slot writes nothing to the caches, and has its result for q.",
     r"s_t < 0 \Rightarrow C' = C,\ q'_t = R_{p_t} N q_t")  # fmt: skip
def skipped_slots(subject, sizes):
    case = subject.draw(sizes)
    for slot in (-1, -(2**40)):
        none = replace(case, slots=torch.full_like(case.slots, slot))
        yield from _unnamed(subject, none, f"elements of the caches when every slot is {slot}")
        yield from _same_q(subject, none, subject(none), subject(case))


@law("With fewer slots than tokens, the tokens without a slot write nothing to the caches, and have results for q.",
     r"t \ge N \Rightarrow C' \text{ does not depend on } t")  # fmt: skip
def fewer_slots(subject, sizes):
    if not subject.convention.fewer_slots:
        raise NotApplicable(f"{subject.convention.name}: every token has an entry that tells its slot")
    case = subject.draw(sizes, skipped=False)
    few = replace(case, slots=case.slots[: case.tokens // 2])
    yield from _unnamed(subject, few, "elements that no token names")
    written, expected = subject(few), subject(case)
    yield from _same_rows(few, written.memory, few, expected.memory, "the slots of the first tokens")
    yield from _same_q(subject, few, written, expected)


@law("Permuting the slots permutes the rows of the caches.",
     r"C'_{\pi}[\pi(s_t)] = C'[s_t]")  # fmt: skip
def slots_permute(subject, sizes):
    case = _live(subject, subject.draw(sizes, skipped=False))
    blocks, block_size = case.places[0].shape[:2]
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(blocks * block_size, generator=generator).to(case.slots.device)
    moved = replace(case, slots=order[case.slots])
    yield from _same_rows(moved, subject(moved).memory, case, subject(case).memory, "rows at permuted slots")


@law("The size of a block and the order of the memory do not change what a slot holds.",
     r"C[s] = C[\lfloor s / B \rfloor, s \bmod B] \text{ for every } B")  # fmt: skip
def cache_arrangement(subject, sizes):
    first = subject.draw(sizes, skipped=False)
    expected = subject(first).memory
    blocks, block_size = first.places[0].shape[:2]
    for order in subject.convention.orders:
        for size in (block_size, 2 * block_size, 1):
            case = _rearranged(subject, first, order, -(-blocks * block_size // size), size)
            try:
                found = subject(case).memory
            except Broken:
                raise
            except Exception as refusal:  # a refusal writes nothing that could be wrong
                yield f"refuses {order} with blocks of {size} ({type(refusal).__name__})"
                continue
            yield from _same_rows(case, found, first, expected, f"rows in {order} with blocks of {size}")


def _rearranged(subject: CacheSubject, case: CacheCase, order: str, blocks: int, block_size: int) -> CacheCase:
    shapes = [place.shape[2:] for place in case.places]
    size, places = arranged(order, blocks, block_size, (shapes[0], shapes[1]), subject.convention.latent)
    generator = torch.Generator().manual_seed(6)
    memory = torch.randn(size, generator=generator).to(case.memory.dtype).to(case.memory.device)
    return replace(case, memory=memory, places=places)


# ---------------------------------------------------------------------------------------------------- independence


@law("Tokens in another order give the same caches, and q in that order.",
     r"(q', C)(\pi t) = (\pi q', C)")  # fmt: skip
def tokens_permute(subject, sizes):
    case = subject.draw(sizes)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(7))
    at = order.to(case.slots.device)
    moved = replace(
        case,
        inputs=tuple(x[:, at] for x in case.inputs),
        positions=case.token_positions()[0][order],
        slots=case.slots[at] if subject.convention.addressed else case.slots,
    )
    written, expected = subject(moved), subject(case)
    yield from _same_q(subject, moved, written, expected, at)
    if subject.convention.addressed:
        yield _same_bits("the memory of the caches", moved, written.memory, expected.memory)
        return
    rows = zip(moved.rows(written.memory), case.rows(expected.memory), strict=True)
    for name, (found, right) in zip("kv", rows, strict=True):
        yield _same_bits(f"stored {name}", moved, found, right[at])


@law("A token in a call of its own has what it has among others.",
     r"q'_t, C[s_t] \text{ are those of } T = 1")  # fmt: skip
def decode(subject, sizes):
    case = subject.draw(sizes)
    for t in (0, 1, case.tokens - 1):
        alone = _part(case, slice(t, t + 1))
        if not subject.convention.addressed:
            alone = subject.draw(replace(sizes, batch=1, tokens=1), seed=t)
        yield from _against_truth(subject, alone, what=" of a token alone")


@law("A token written into the slot of a rejected draft leaves nothing of the draft, and accepted tokens as they are.",
     r"C''[s_t] = Q\,(R_{p_t} N k''_t,\ v''_t) \ (t \ge n),\quad C''[s_t] = C'[s_t]\ (t < n)")  # fmt: skip
def drafts(subject, sizes):
    kind = subject.convention
    if kind.turns_cached or not kind.addressed:
        raise NotApplicable(f"{kind.name}: the operator writes no tokens into slots that the caller chooses")
    drafted, other = subject.draw(sizes, skipped=False), subject.draw(sizes, skipped=False, seed=2)
    accepted = drafted.tokens // 2
    memory = drafted.memory.clone()
    subject(drafted, memory)
    before = memory.clone()
    inputs = tuple(x[:, accepted:] for x in other.inputs)
    again = replace(_part(drafted, slice(accepted, None)), inputs=inputs, memory=before)
    written = subject(again, memory)
    yield from _against_truth(subject, again, written, what=" in slots of rejected drafts")
    kept = _part(drafted, slice(accepted))
    yield from _same_rows(kept, memory, kept, before, "accepted tokens")


def _part(case: CacheCase, tokens: slice) -> CacheCase:
    """Return a call of some of the tokens."""
    inputs = tuple(x[:, tokens] for x in case.inputs)
    return replace(case, inputs=inputs, positions=case.token_positions()[0][tokens], slots=case.slots[tokens])


@law("The bits of a token do not depend on the contents of the other tokens, not even on NaN.",
     r"q'_t, C[s_t] \text{ are functions of } q_t, k_t, v_t, p_t")  # fmt: skip
def neighbours(subject, sizes):
    case = subject.draw(sizes, skipped=False)
    changed = [x.clone() for x in case.inputs]
    for x in changed:
        x[:, 1::2] = float("nan")
    other = replace(case, inputs=tuple(changed))
    written, expected = subject(other), subject(case)
    if written.q is not None:
        yield _same_bits("q beside tokens of NaN", other, written.q[::2], expected.q[::2])
    rows = zip(other.rows(written.memory), case.rows(expected.memory), strict=True)
    for name, (found, right) in zip(("k", "v"), rows, strict=True):
        yield _same_bits(f"stored {name} beside tokens of NaN", other, found[::2], right[::2])


@law("The result for k does not depend on q and its weights, nor the result for q on k, v and their weights.",
     r"q' = f(q, w_q),\quad C = f(k, w_k, v)")  # fmt: skip
def keys_independent(subject, sizes):
    _needs_queries(subject)
    case, other = subject.draw(sizes, skipped=False), subject.draw(sizes, skipped=False, seed=2)
    expected = subject(case)
    new_q = replace(case, inputs=(other.inputs[0], *case.inputs[1:]), weights=other.weights[:1] + case.weights[1:])
    found = subject(new_q)
    yield _same_bits("the caches when only q and its weights changed", new_q, found.memory, expected.memory)
    new_k = replace(case, inputs=(case.inputs[0], *other.inputs[1:]), weights=case.weights[:1] + other.weights[1:])
    found = subject(new_k)
    yield _same_bits("q when only k, v and their weights changed", new_k, found.q, expected.q)


@law("The stored v has the bits of v, and the stored k has the bits of the result for k.",
     r"C_v[s_t] = v_t,\quad C_k[s_t] = k'_t")  # fmt: skip
def stored_is_the_result(subject, sizes):
    if subject.convention.float8_only:
        raise NotApplicable(f"{subject.convention.name}: it has 8-bit floats only")
    case = subject.draw(sizes)
    written = subject(case)
    k, v = case.rows(written.memory)
    at = case.live.to(k.device)
    yield _same_bits("stored v", case, v, case.inputs[2][0][at])
    if written.k is not None:
        yield _same_bits("stored k", case, k, written.k[at])
    if written.v is not None:
        yield _same_bits("v", case, written.v, case.inputs[2][0])


# ---------------------------------------------------------------------------------------------------------- scales


@law("Values and scale times a power of two give the same 8-bit floats.",
     r"\mathrm{fl}_8(2^n x / 2^n \sigma) = \mathrm{fl}_8(x / \sigma)")  # fmt: skip
def scale_law(subject, sizes):
    if isinstance(subject.convention, BlockScales):
        raise NotApplicable(f"{subject.convention.name}: the operator makes the scales")
    case = subject.draw(sizes, cache_dtype=FLOAT8_DTYPES[0], norm=False if subject.convention.optional_norm else None)
    expected = _offered(subject, case).memory
    for power in (2.0, 0.25):
        scales = (case.scales[0], case.scales[1] * power, case.scales[2] * power)
        q, k, v = case.inputs
        weights = case.weights
        if weights:  # the weights scale a normalized k
            weights = weights[0], weights[1] * power
        else:
            k = k * power
        scaled = replace(case, inputs=(q, k, v * power), weights=weights, scales=scales)
        yield _same_bits(f"the caches of values and scales times {power:g}", scaled, subject(scaled).memory, expected)


@law("The scale of one cache does not change the other cache, and no scale changes q.",
     r"C_v \text{ does not depend on } \sigma_k")  # fmt: skip
def scales_apart(subject, sizes):
    if not subject.convention.scales_differ:
        raise NotApplicable(f"{subject.convention.name}: both caches have one scale")
    case = subject.draw(sizes, cache_dtype=FLOAT8_DTYPES[0])
    expected = _offered(subject, case)
    for which, name in ((1, "v"), (2, "k")):
        scales = tuple(s * 3 if i == which else s for i, s in enumerate(SCALES))
        other = replace(case, scales=(scales[0], scales[1], scales[2]))
        found = subject(other)
        kept = 2 - which
        rows = other.rows(found.memory)[kept], case.rows(expected.memory)[kept]
        yield _same_bits(f"stored {name} when only the other scale changed", other, *rows)
        yield from _same_q(subject, other, found, expected)


@law("The norm removes the size of a head: inputs times a power of two give the same results within the bound.",
     r"N(2^n x;\ 4^n \epsilon) = N(x;\ \epsilon)")  # fmt: skip
def norm_removes_the_size(subject, sizes):
    if not subject.convention.norm or subject.convention.float8_only:
        raise NotApplicable(f"{subject.convention.name}: it has no norm, or 8-bit floats only")
    case = subject.draw(sizes, skipped=False)
    q, k, v = case.inputs
    larger = replace(case, inputs=(4 * q, 4 * k, v), eps=16 * case.eps)
    written, expected = subject(larger), subject(case)
    for name, which, found, right in (
        ("q", 0, written.q, expected.q),
        ("stored k", 1, larger.rows(written.memory)[0], case.rows(expected.memory)[0]),
    ):
        _, bound = subject.expected(case)[which]
        yield Comparison(f"{name} of heads times 4", numbers(found), numbers(right), 2 * bound, larger, AXES)


# ---------------------------------------------------------------------------------------------------------- memory


@law(
    "Inputs, weights, tables, positions, slots and scales stay as they were.",
    r"(q, k, v) \mapsto (q', C) \text{ leaves } q, k, v",
)
def inputs_unchanged(subject, sizes):
    case = subject.draw(sizes)
    memory = case.memory.clone()
    arguments = subject.convention.translate(subject, case, memory)
    named = {f"argument {i}": x for i, x in enumerate(arguments.positional)} | dict(arguments.keywords)
    written = _storages(arguments.inputs)
    others = {name: x for name, x in named.items() if isinstance(x, torch.Tensor) and not _storages([x]) & written}
    before = {name: x.clone() for name, x in others.items()}
    subject.call(case, arguments, memory)
    for name, x in others.items():
        if not torch.equal(x, before[name]):
            raise Broken(f"{name} was overwritten")
    yield Comparison("arguments that were overwritten", np.zeros(1), np.zeros(1), _EQUAL, case, ("of all",))


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


@law("Every element of the results is written: no earlier content of the memory is left.",
     r"q'_j \text{ is a number for all } j")  # fmt: skip
def all_written(subject, sizes):
    case = _live(subject, subject.draw(sizes))
    written = subject(case)
    for name, y in (("q", written.q), ("k", written.k)):
        if y is not None:
            finite = np.isfinite(numbers(y)).astype(float)
            yield Comparison(f"whether {name} is a number", finite, np.ones_like(finite), _EQUAL, case, AXES)
    other = replace(case, memory=(~bits(case.memory)).view(case.memory.dtype))
    yield from _same_rows(other, subject(other).memory, case, written.memory, "rows in a memory of other bits")
    if isinstance(subject.convention, RopeAndQuantize):
        for tokens in (5, 6, 7):
            yield from _behind_the_tokens(subject, subject.draw(replace(sizes, batch=1, tokens=tokens)))


def _behind_the_tokens(subject: CacheSubject, case: CacheCase) -> Iterator[Comparison | str]:
    """Compare with zeros what TMA reads behind the tokens of a column of scales that the operator allocates."""
    arguments = subject.convention.translate(subject, case, case.memory.clone())
    arguments = replace(arguments, keywords={**arguments.keywords, "out": None, "scales": None})
    try:
        with subject.surroundings.theirs():
            _, scales = call(subject.function, arguments, subject.convention.signature)
    except Exception as refusal:  # the caller of such an operator allocates
        yield f"allocates no scales ({type(refusal).__name__})"
        return
    (tokens, groups, columns), (of_token, of_group, of_column) = scales.shape, scales.stride()
    if of_token != 1 or of_column % TMA_SCALES:
        yield "allocates its scales in another order than TMA reads"
        return
    behind = -tokens % TMA_SCALES
    last = scales.storage_offset() + (groups - 1) * of_group + (columns - 1) * of_column + tokens + behind
    if (missing := last * scales.itemsize - scales.untyped_storage().nbytes()) > 0:
        raise Broken(f"the memory of the scales of {tokens} tokens ends {missing} bytes before what TMA reads")
    padding = scales.as_strided((groups, columns, behind), (of_group, of_column, 1), scales.storage_offset() + tokens)
    yield Comparison(
        "what TMA reads behind the tokens of a column of scales", bit_numbers(padding), np.zeros(padding.shape), _EQUAL,
        case, ("group", "column", "element"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- only if named


@law("The results have the bits of `ropelab.apply_rope` or `apply_qk_norm_rope` and a separate write.",
     r"C[s_t] = Q\,\mathrm{rope}(k)_t \text{ in bits}", by_default=False)  # fmt: skip
def equals_separate_launches(subject, sizes):
    if isinstance(subject.convention, BlockScales):
        raise NotApplicable("no other function of ropelab makes block scales")
    norms = [False, True] if subject.convention.optional_norm else [subject.convention.norm]
    if subject.norm_last or subject.norm_across or subject.table_free:  # `apply_qk_norm_rope` has no such norm
        norms = [norm for norm in norms if not norm]
    if not norms:
        raise NotApplicable("apply_qk_norm_rope normalizes each head before the rotation, and takes tables")
    for cache_dtype in (None,) if subject.convention.turns_cached else (None, *FLOAT8_DTYPES):
        for norm in norms:
            case = subject.draw(sizes, cache_dtype=cache_dtype, norm=norm)
            q, k = _separately(subject, case)
            written, memory = subject(case), case.memory.clone()
            rows = _written_separately(subject, case, memory, (k, case.inputs[2][0]))
            tokens = case.live if subject.convention.whole_tokens else torch.ones(case.tokens, dtype=torch.bool)
            at = tokens.to(q.device)
            how = f"{'norm and ' if norm else ''}rotation, cache in {_name(case.memory.dtype)}"
            if written.q is not None:
                yield _same_bits(
                    f"q ({how})", case, written.q[at], _converted(subject, case, 0, q, written.q.dtype)[at]
                )
            yield _same_bits(f"the memory of the caches ({how})", case, written.memory, rows)


def _separately(subject: CacheSubject, case: CacheCase) -> tuple[torch.Tensor, torch.Tensor]:
    where: dict[str, Any] = {
        **subject.convention.angles(subject, case), "positions": case.token_positions()[0].to(subject.device),
        "layout": subject.layout, "seq_format": "thd",
    }  # fmt: skip
    q, k, _ = (x[0] for x in case.inputs)
    if not case.weights:
        return apply_rope(q, k, **where)
    weights = (w + case.weight_offset for w in case.weights)
    return apply_qk_norm_rope(q, k, *weights, eps=case.eps, **where)


def _written_separately(subject, case, memory, sources) -> torch.Tensor:
    slots, live = case.slots, case.live.to(memory.device)
    kept = slots[slots >= 0]
    for which, (cache, x) in enumerate(zip(case.caches(memory), sources, strict=True), start=1):
        rows = _converted(subject, case, which, x, cache.dtype)
        size = cache.shape[1]
        bits(cache)[kept // size, kept % size] = bits(rows)[live]
    return memory


def _converted(subject, case, which: int, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in FLOAT8_DTYPES:
        return x.to(dtype)
    if subject.convention.row_scales:
        return to_float8(x.float() / scale_of_rows(x, dtype)[..., None], dtype)
    scale = torch.tensor(subject.convention.divisor(case.scales[which]), dtype=torch.float32, device=x.device)
    return to_float8(x.float() / scale, dtype)


# ---------------------------------------------------------------------------------------------------------------


def _needs_queries(subject: CacheSubject) -> None:
    if not subject.convention.queries:
        raise NotApplicable(f"{subject.convention.name}: there are no queries")


def _offered(subject: CacheSubject, case: CacheCase) -> Written:
    """Return the results; an operator that refuses caches in 8-bit floats does not offer them."""
    try:
        return subject(case)
    except (Broken, NotApplicable):
        raise
    except Exception as refusal:
        if case.memory.dtype not in FLOAT8_DTYPES or subject.convention.float8_only:
            raise
        name = _name(case.memory.dtype)
        raise NotApplicable(f"refuses caches in {name} ({type(refusal).__name__}: {refusal})") from None


def _live(subject: CacheSubject, case: CacheCase) -> CacheCase:
    """Return the case with a slot for every token, if the operator may leave out tokens without a slot."""
    if not subject.convention.whole_tokens or bool(case.live.all()):
        return case
    blocks, block_size = case.places[0].shape[:2]
    free = torch.ones(blocks * block_size, dtype=torch.bool)
    free[case.slots[case.slots >= 0].cpu()] = False
    slots = case.slots.clone()
    slots[slots < 0] = free.nonzero()[:, 0][: int((slots < 0).sum())].to(slots.device)
    return replace(case, slots=slots)


def _unnamed(subject: CacheSubject, case: CacheCase, what: str) -> Iterator[Comparison]:
    written = subject(case)
    outside = ~case.named().to(written.memory.device)
    found, before = (bit_numbers(x[outside]) for x in (written.memory, case.memory))
    yield Comparison(what, found, before, _EQUAL, case, ("element",))
    for scales in () if written.scales is None else written.scales[1:]:
        kept = scales.flatten(0, 1).clone()
        kept[case.slots[case.slots >= 0]] = UNWRITTEN
        yield Comparison(f"scales of {what}", numbers(kept), np.full(kept.shape, UNWRITTEN), _EQUAL, case, AXES[:2])


def _same_bits(what: str, case: CacheCase, actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    axes = AXES if actual.ndim == 3 else ("element",)
    if actual.dtype != expected.dtype:
        raise Broken(f"{what}: expected {expected.dtype}, got {actual.dtype}")
    return Comparison(what, bit_numbers(actual), bit_numbers(expected), _EQUAL, case, axes)


def _same_rows(case, memory, expected_case, expected_memory, what: str) -> Iterator[Comparison]:
    """Compare the rows at the slots of ``case`` with the rows of the same tokens of another case."""
    count = len(case.slots[case.slots >= 0])
    for name, found, right in zip(
        "kv", case.rows(memory), expected_case.rows(expected_memory), strict=True
    ):  # fmt: skip
        yield _same_bits(f"{what}: {name}", case, found, right[:count])


def _same_q(subject, case, actual: Written, expected: Written, order=slice(None)) -> Iterator[Comparison]:
    if actual.q is not None and expected.q is not None:
        at = case.live.to(actual.q.device) if subject.convention.whole_tokens else slice(None)
        yield _same_bits("q", case, actual.q[at], expected.q[order][at])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CACHE_LAWS: dict[str, Law] = {value.name: value for value in list(vars().values()) if isinstance(value, Law)}
"""Name -> law."""
