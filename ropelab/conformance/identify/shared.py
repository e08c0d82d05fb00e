"""Say what becomes of an input that all heads share, and of what passes beside it, as in latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.autograd import grad

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.convention import call
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.plain import plain
from ropelab.conformance.latent_conventions import heads_as_sequences
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors
from ropelab.conformance.words import unequal
from ropelab.layout.pairing import join, pairs
from ropelab.layout.seq_format import to_bshd

NOUNS = ("sequence", "token", "head", "feature")
HEADS = (1, 2, 3, 4, 5, 8, 17)
"""The numbers of heads whose shares in a gradient are measured."""
SHARE = "heads that share an input rotate it alike, and its gradient is the sum over the heads"


def shared(subject: Subject, sizes: Sizes) -> tuple[list[Deviation], str]:
    """Return what a function does to its parts beside one head of the shared input, and an example in words.

    The words of a result hold for three calls, whose first tokens have different positions.
    """
    found, example = _beside(subject, sizes)
    if not found:  # other numbers of heads may have another path
        found, example = _beside(subject, replace(sizes, q_heads=3, k_heads=3))
        found = [replace(d, scope=replace(d.scope, words="in calls with 3 heads")) for d in found]
    if told := _shares(subject, sizes):
        found.append(_deviation(subject.convention.shared, told, gradient=True))
    return found, example


def _beside(subject: Subject, sizes: Sizes) -> tuple[list[Deviation], str]:
    """Return what a function does to its parts in the results."""
    words: dict[str, list[str]] = {}
    example = ""
    for seed, offset in enumerate((2, 7, 3)):  # at position 0 a head may be right by chance
        case = subject.draw(replace(sizes, tokens=sizes.tokens + seed), seed=seed, offsets=offset)
        try:
            said = dict(_parts(subject, case))
        except Exception:  # the laws say so
            return [], ""
        for name, (facts, told) in said.items():
            words[name] = facts if not seed else [fact for fact in words.get(name, []) if fact in facts]
            example = example or told
        words = {name: facts for name, facts in words.items() if name in said}
    return [_deviation(name, (facts or ["is not as it came"])[0]) for name, facts in words.items()], example


def _deviation(name: str, words: str, gradient: bool = False) -> Deviation:
    return Deviation("shared", words, SHARE, lambda plan: None, scope=Scope(name, gradient))


def _pieces(subject: Subject, case: Case) -> tuple[dict[str, tuple[Tensors, torch.Tensor]], Tensors]:
    """Return the parts of the results by name, and the tensors that the function gets."""
    arguments = subject.arguments(case)
    with subject.surroundings.theirs():
        returned = call(subject.convention.callable(subject, case), arguments, subject.convention.signature)
    return subject.convention.pieces(subject, case, returned, arguments), arguments.inputs


def _parts(subject: Subject, case: Case) -> Iterator[tuple[str, tuple[list[str], str]]]:
    """Yield the wrong parts: the name, facts that hold for all wrong numbers, and the first wrong number in words."""
    fmt, spread = subject.format(case), heads_as_sequences(case)
    turned, near = (x[..., : case.rotary_dim] for x in subject.expected(spread)[0])
    for number, (name, (heads, meant)) in enumerate(_pieces(subject, case)[0].items()):
        y = exact(torch.cat([to_bshd(head, fmt) for head in heads], dim=2).detach())
        x = exact(to_bshd(meant, fmt).detach())
        if number == 0 and (y == y[:, :, :1]).all():  # any mistake is that of one head
            continue
        right, bound = (turned, near) if number == 0 else (x, np.zeros_like(x))
        x, right, bound = (np.broadcast_to(z, y.shape) for z in (x, right, bound))
        wrong = ~((abs(y - right) <= bound) | (np.isnan(y) & np.isnan(right)))
        if wrong.any():
            given = {} if number else {"k_pe": x}
            if number == 0 and subject.layout != subject.out_layout:
                moved = join(*pairs(torch.from_numpy(x.astype(np.float64)), subject.layout), subject.out_layout)
                given["k_pe in the layout of the result"] = exact(moved)
            facts = list(plain(y, wrong, [(name, right, bound)], given, NOUNS, case.rotary_dim))
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            actual, expected = unequal(float(y[at]), float(right[at]))
            count = f"{wrong.sum()} of {wrong.size} elements are wrong"
            yield name, (facts, f"{name} {list(y.shape)}: {count}, such as {list(at)}: {actual} in place of {expected}")


def _shares(subject: Subject, sizes: Sizes) -> str:
    """Return in words how often the shared input gets the gradient of each head; an empty text if once from each."""
    found: dict[int, list[float]] = {}
    for heads in HEADS:
        try:
            case = subject.draw(replace(sizes, batch=1, tokens=2, q_heads=heads, k_heads=heads))
            times = _times(subject, case)
        except Exception:  # a function may know certain heads only
            continue
        if times is None or (heads == 1 and times != [1]):
            return ""
        found[heads] = times
    wrong = {heads: times for heads, times in found.items() if set(times) != {1}}
    if not wrong:
        return ""
    if all(times == [1] + (heads - 1) * [0] for heads, times in wrong.items()):
        told = "is that of the first of the heads that share it, and not the sum over the heads"
    elif all(abs(heads * t - 1) < 0.01 for heads, times in wrong.items() for t in times):
        told = "is the mean over the heads that share it, and not the sum"
    else:
        told = "; ".join(_in_words(times) for times in list(wrong.values())[:3]).replace("; lacks", ",")
    right = [str(heads) for heads in found if heads not in wrong]
    return f"{told}; it is right for {', '.join(right)} heads" if len(right) > 1 else told


def _in_words(times: list[float]) -> str:
    alike: dict[float, list[str]] = {}
    for head, share in enumerate(times):
        alike.setdefault(share, []).append(str(head))
    parts = []
    for share, heads in alike.items():
        which = f"head{'s' * (len(heads) > 1)} {', '.join(heads)}"
        if share != 1:
            parts.append(f"lacks {which}" if share == 0 else f"has {share:g} times {which}")
    return f"{' and '.join(parts)} of {len(times)}"


def _times(subject: Subject, case: Case) -> list[float] | None:
    """Return how often the shared input gets the gradient of each head; None where a share is no multiple."""
    subject.require_gradients()
    tracked = replace(case, inputs=tuple(x.detach().requires_grad_() for x in case.inputs))
    parts, (_, k_pe) = _pieces(subject, tracked)
    turned, _ = next(iter(parts.values()))
    fmt, spread = subject.format(case), heads_as_sequences(case)
    g = subject.cotangents(spread).cotangents[0]
    right, near = (x[..., : case.rotary_dim] for x in subject.expected(spread, [g], transposed=True)[0])
    g = g[..., : case.rotary_dim]
    found = []
    for head in turned:
        if not head.requires_grad:
            raise NotApplicable("a part of the key has no gradient")
        with subject.surroundings.theirs():
            (arrived,) = grad(to_bshd(head, fmt), (k_pe,), g, allow_unused=True, retain_graph=True)
        d = np.zeros_like(right) if arrived is None else exact(to_bshd(arrived, fmt))
        share = float((d * right).sum() / (right * right).sum())
        share = round(share) if abs(share - round(share)) < 1e-3 else share
        if not (abs(d - share * right) <= (1 + abs(share)) * (len(turned) + 1) * near).all():
            return None
        found.append(share)
    return found
