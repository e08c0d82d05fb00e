"""The laws of memory: what a function may overwrite, and what its result may not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.autograd import grad

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Broken, NotApplicable
from ropelab.conformance.convention import offers
from ropelab.conformance.law import Comparison, against, counted, equal, law, names
from ropelab.conformance.tensors import copied
from ropelab.layout.seq_format import from_bshd, to_bshd


@law("Inputs, tables, positions and cotangents stay as they were; in place, the inputs become the result.",
     r"x \mapsto Rx \text{ leaves } x")  # fmt: skip
def inputs_unchanged(subject, sizes):
    plain, moved = subject.draw(sizes), subject.draw(sizes, offsets=tuple(range(1, sizes.batch + 1)))
    # Models pass projections as views of [B, S, H, D] in every format. Some functions copy the view, some overwrite it.
    projected = replace(plain, inputs=tuple(x.clone(memory_format=torch.contiguous_format) for x in plain.inputs))
    for case in (plain, projected, moved):
        if not subject.can(case):
            continue
        working = replace(case, inputs=tuple(map(copied, case.inputs)))
        versions = [x._version for x in working.inputs]
        arguments = subject.arguments(working)
        others = {name: x.clone() for name, x in arguments.others().items()}
        try:
            outputs = subject.call(working, arguments)
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if case is not projected:
                raise
            yield f"refuses views of projections ({type(refusal).__name__})"
            continue
        written = versions != [x._version for x in working.inputs]
        if subject.in_place:
            yield from equal(case, working.inputs, outputs, "{} overwritten by the result")
            if subject.convention.differentiable and not written:
                raise Broken("the version counters of the inputs did not change: autograd may use overwritten inputs")
        else:
            yield from equal(case, working.inputs, case.inputs, "{} after the call")
            if written:
                raise Broken("an input was overwritten (its version counter changed) without a declaration of in-place")
        for name, x in arguments.others().items():
            if not torch.equal(x, others[name]):
                raise Broken(f"{name} was overwritten")
    if subject.convention.differentiable:
        case = subject.cotangents(subject.draw(sizes))
        yield from equal(case, subject.cotangents_after(case), case.cotangents, "cotangent of {} after the backward")


@law("With inplace=True the input becomes the result, which is the same as without.", r"x \mapsto Rx")
def inplace(subject, sizes):
    if subject.in_place:
        raise NotApplicable("every call is in place, so the other laws say it")
    if subject.convention.in_place is not None or not offers(subject.function, "inplace"):
        raise NotApplicable("the function has no argument 'inplace'")
    subject = replace(subject, in_place=True)
    cases = [subject.draw(sizes), subject.draw(sizes, offsets=3)]
    cases.append(subject.draw(replace(sizes, batch=1, tokens=sizes.tokens + 3), lengths=(2, 1, sizes.tokens)))
    cases.append(replace(cases[0], inputs=tuple(map(cut, cases[0].inputs))))
    for case in filter(subject.can, cases):
        truth = subject.expected(case)
        working = replace(case, inputs=tuple(map(copied, case.inputs)))
        try:
            outputs = subject.call(working, subject.arguments(working))
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if case is cases[-1]:
                yield f"refuses inputs cut out of q, k and v with inplace=True ({type(refusal).__name__})"
                continue
            raise NotApplicable(f"refuses inplace=True ({type(refusal).__name__})") from refusal
        yield from against(case, outputs, truth, "{} with inplace=True", truth=True)
        for name, x, now, y in zip(names(case), case.inputs, working.inputs, outputs, strict=True):
            if torch.equal(x, now) and not torch.equal(y, now):
                raise Broken(f"with inplace=True {name} stays as it was, and the result is in other memory")
        yield from equal(case, working.inputs, outputs, "the input {} after a call with inplace=True")
    if subject.convention.differentiable:
        case = subject.cotangents(cases[0])
        truth = subject.expected(case, case.cotangents, transposed=True)
        yield from against(case, subject.gradients(case)[1], truth, "gradient of {} with inplace=True")


@law("Every element of results and gradients is written: no earlier content of the memory is left.",
     r"(Rx)_j \text{ is a number for all } j")  # fmt: skip
def all_written(subject, sizes):
    case = subject.cotangents(subject.draw(sizes))
    written = [("{}", subject(case))]
    if subject.convention.differentiable:
        written.append(("gradient of {}", subject.gradients(case)[1]))
    for what, tensors in written:
        for name, y in zip(names(case), tensors, strict=True):
            finite = np.isfinite(exact(y)).astype(float)
            what_is = f"whether {what.format(name)} is a number"
            yield Comparison(what_is, finite, np.ones_like(finite), np.zeros(1), case)


@law("A result does not depend on how the input lies in memory.", r"R x \text{ is a function of } x_{bshd}")
def strides(subject, sizes):
    case = subject.draw(sizes)
    for how, lay_out in ARRANGEMENTS.items():
        if how.startswith("expanded") and subject.in_place:
            continue
        arranged = replace(case, inputs=tuple(map(lay_out, case.inputs)))
        try:
            outputs = subject(arranged)
        except Broken:
            raise
        except Exception as refusal:  # a refusal gives no result that could depend on the memory
            yield f"refuses inputs {how} ({type(refusal).__name__})"
            continue
        yield from against(arranged, outputs, _contiguous_result(subject, arranged), f"{{}} {how}")


def _contiguous_result(subject, case):
    """Return the result of the same numbers in contiguous memory, and the rounding of both calls together."""
    case = subject.with_inputs(case, case.inputs)
    return [(exact(y), 2 * bound) for y, (_, bound) in zip(subject(case), subject.expected(case), strict=True)]


def cut(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a slice of a buffer with more heads, like q in a fused projection."""
    buffer = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), float("nan"), dtype=x.dtype, device=x.device)
    buffer[:, :, 1:-2] = x
    return buffer[:, :, 1:-2]


def _every_second(x: torch.Tensor, axis: int) -> torch.Tensor:
    buffer = x.repeat_interleave(2, axis)
    return buffer[(slice(None),) * axis + (slice(None, None, 2),)]


ARRANGEMENTS = {
    "cut out of q, k and v": cut,
    "with tokens innermost": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "with heads outermost": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "at every second token": lambda x: _every_second(x, 1),
    "at every second feature": lambda x: _every_second(x, 3),
    "expanded over sequences": lambda x: x[:1].expand_as(x),
    "expanded over heads": lambda x: x[:, :, :1].expand_as(x),
}
"""Description -> function that returns ``x [B, S, H, D]`` in memory of that arrangement."""


@law("Nothing is written outside of the tensors.", r"\text{memory beside } x, g \text{ stays}")
def guards(subject, sizes):
    case = subject.cotangents(subject.draw(sizes))
    for margin in (0, 1):  # contiguous, then the heads of a larger buffer
        inputs, input_canaries = zip(*(_guarded(subject, case, x, margin) for x in case.inputs), strict=True)
        cotangents, canaries = zip(*(_guarded(subject, case, g, margin) for g in case.cotangents), strict=True)
        guarded = replace(case, inputs=inputs)
        if not subject.can(guarded):
            continue
        try:
            subject.call(guarded, subject.arguments(guarded))
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if not margin:
                raise
            yield f"refuses inputs with gaps ({type(refusal).__name__})"
            continue
        yield counted(guarded, "elements written outside of the tensors", _gone(input_canaries))
        if subject.convention.differentiable:
            tracked = tuple(x.detach().requires_grad_() for x in inputs)
            outputs = subject(replace(case, inputs=tracked))
            if all(y.requires_grad for y in outputs):
                with subject.surroundings.theirs():
                    grad(outputs, tracked, cotangents, allow_unused=True)
                gone = _gone((*input_canaries, *canaries))
                yield counted(guarded, "elements written outside of the tensors by the backward", gone)


CANARY = 1234.0


def _guarded(subject, case, x, margin):
    """Return ``x`` inside a buffer of canaries, and a function that counts the canaries that were overwritten."""
    fmt = subject.format(case)
    native, heads, beside = from_bshd(x, fmt), fmt.index("h"), 64
    if margin:
        shape = list(native.shape)
        shape[heads] += 2
        buffer = torch.full(shape, CANARY, dtype=x.dtype, device=x.device)
        inside = buffer.narrow(heads, 1, native.shape[heads])
    else:
        buffer = torch.full((native.numel() + 2 * beside,), CANARY, dtype=x.dtype, device=x.device)
        inside = buffer[beside:-beside].view(native.shape)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside.as_strided(inside.shape, inside.stride(), inside.storage_offset()).fill_(False)
    inside.copy_(native)
    return to_bshd(inside, fmt), lambda: int((buffer[outside] != CANARY).sum())


def _gone(canaries) -> int:
    return sum(count() for count in canaries)
