"""The laws of numbers: dtypes, rounding, long contexts, repetition, compilation and autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Broken, NotApplicable, Noted
from ropelab.conformance.law import Comparison, against, against_truth, counted, equal, law, names
from ropelab.kernels import INTERPRETED

NARROW = (torch.bfloat16, torch.float16)


@law("Results and gradients have the dtype of the inputs.", r"\operatorname{dtype}(Rx) = \operatorname{dtype}(x)")
def dtype(subject, sizes):
    for kind in (*NARROW, torch.float32):
        case = subject.cotangents(subject.draw(sizes, dtype=kind))
        made = {"{}": subject(case)}
        if subject.convention.differentiable:
            made["gradient of {}"] = subject.gradients(case)[1]
        for what, tensors in made.items():
            for name, y in zip(names(case), tensors, strict=True):
                if y.dtype != kind:
                    raise Broken(f"{what.format(name)}: expected {kind}, the dtype of the inputs, got {y.dtype}")
        yield counted(case, "results of another dtype")


@law("16-bit results are off by no more than the roundings of the declared arithmetic.",
     r"|\hat y - y| \le \mathrm{ulp}(y) + E")  # fmt: skip
def rounding(subject, sizes):
    for kind in NARROW:
        case = subject.cotangents(subject.draw(sizes, dtype=kind))
        yield from against_truth(subject, case)
        if subject.convention.differentiable:
            if kind == torch.bfloat16:  # it reaches far beyond float16
                yield from against_truth(subject, subject.with_inputs(case, [x * _BEYOND_HALF for x in case.inputs]))
            truth = subject.expected(case, case.cotangents, transposed=True)
            yield from against(case, subject.gradients(case)[1], truth, "gradient of {}")
    case = subject.draw(sizes, dtype=torch.float32)
    yield from against(case, subject(case), subject.expected(case), "{} in float32 after calls in 16 bits", truth=True)


_BEYOND_HALF = 2.0**18
"""A factor that takes most elements beyond 65,504, the largest number of float16."""

LARGE = (4_097, 99_999, 100_000, 131_071, 999_999, 1_000_000)


@law("Results at positions up to a million are as accurate as results at small positions.", r"y = R(10^6)\,x")
def large_positions(subject, sizes):
    if not subject.convention.looks_up:
        raise NotApplicable(f"{subject.convention.name}: the caller looks up or computes the cosines")
    for kind in dict.fromkeys((subject.dtype, torch.bfloat16)):
        try:
            comparisons = list(_far(subject, sizes, kind))
        except (Broken, NotApplicable):
            raise
        except Exception as refusal:
            if not subject.convention.own_tables:
                raise
            yield f"refuses positions beyond {LARGE[0]} ({type(refusal).__name__})"  # its tables may end before
            continue
        yield from comparisons


def _far(subject, sizes, kind: torch.dtype) -> Iterator[Comparison]:
    small = replace(sizes, tokens=len(LARGE))
    cases = [subject.draw(small, dtype=kind, positions=torch.tensor(LARGE))]
    cases.append(subject.draw(small, dtype=kind, offsets=LARGE[-1] - len(LARGE)))
    if found := [case for case in cases if subject.can(case)]:
        yield from against_truth(subject, found[0])
    else:
        long = replace(sizes, batch=1, q_heads=1, k_heads=1, tokens=100_001)
        require_few(subject, long)
        yield from _last_tokens(subject, subject.draw(long, dtype=kind))


def _last_tokens(subject, case, count: int = 8) -> Iterator[Comparison]:
    first = case.shape[1] - count
    ends = tuple(x[:, first:] for x in case.inputs)
    at = first + torch.arange(count)
    truth = subject.expected(replace(case, inputs=ends, positions=at))
    yield from against(case, [y[:, first:] for y in subject(case)], truth, truth=True, tokens=at.tolist())


MOST_CALLS = 10_000_000
"""The number of calls of functions in Python that a call of the subject may make: about 10 s, whatever the machine."""


def require_few(subject, sizes, limit: int = MOST_CALLS) -> None:
    """Raise NotApplicable if a call on tensors of these sizes would make more than ``limit`` calls in Python.

    An interpreted kernel makes them for every token, and so does a loop over the tokens. They are counted, not timed,
    so that the verdict does not depend on the machine.
    """

    def calls(tokens: int) -> int:
        case, number, before = subject.draw(replace(sizes, tokens=tokens)), 0, sys.getprofile()

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            subject(case)
        finally:
            sys.setprofile(before)
        return number

    calls(8)  # the first call compiles and warms up
    for _ in range(3):  # again, because the next calls may compile, too
        short, long = calls(8), calls(136)
        expected = max(long - short, 0) * sizes.tokens // 128
        if expected <= limit:
            return
    raise NotApplicable(f"a call on {sizes.tokens} tokens would make {expected:,} calls of functions in Python")


@law("A repeated call gives the same bits, whatever calls come in between.", r"R x = R x")
def determinism(subject, sizes):
    case = subject.cotangents(subject.draw(sizes))
    longer = subject.draw(replace(sizes, batch=1, tokens=4 * sizes.tokens))
    first = subject(case)
    if not subject.in_place:
        handed_over = subject.call(case, subject.arguments(case))
        subject(subject.draw(sizes, seed=2))
        yield from equal(case, handed_over, first, "{} of an earlier call, after a call on other inputs")
    gradients = subject.gradients(case)[1] if subject.convention.differentiable else None
    for _ in range(50 if subject.device.startswith("cuda") else 3):
        subject(longer)
        yield from equal(case, subject(case), first, "{} of a repeated call")
        if gradients is not None:
            yield from equal(case, subject.gradients(case)[1], gradients, "gradient of {} of a repeated call")


@law("torch.compile changes nothing beyond rounding.", r"\mathrm{compile}(R)\,x = R x")
def compile(subject, sizes):  # noqa: A001
    # On a CPU the traced graphs run as they are: that needs no C++ compiler, and takes 1 s where inductor takes 10 s.
    backend = "inductor" if subject.device.startswith("cuda") else "aot_eager"
    function = subject.function
    if getattr(function, "_torchdynamo_disable", False):  # as a function of JAX is
        raise NotApplicable("the function is excluded from torch.compile")

    def compiled(of: Callable) -> Callable:
        return torch.compile(of, backend=backend)

    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        function = lambda *a, **k: compiled(subject.function(*a, **k))  # noqa: E731
    else:
        function = compiled(function)
    torch._dynamo.reset()
    on_cpu = not subject.device.startswith("cuda")
    if INTERPRETED and on_cpu:  # the function may be an interpreted kernel, and tracing large sizes takes long to fail
        sizes = replace(sizes, batch=1, tokens=2, q_heads=1, k_heads=1)
    refusals: tuple[type[Exception], ...] = (torch._dynamo.exc.TorchDynamoException, *_interpreter_errors())
    try:
        yield from _unchanged(subject, replace(subject, function=function), sizes, "{} compiled")
    except refusals as error:
        if INTERPRETED and on_cpu:
            raise NotApplicable("interpreted Triton kernels cannot be compiled") from error
        raise


def _interpreter_errors() -> tuple[type[Exception], ...]:
    """Return the exception of Triton's interpreter; the laws need no Triton, and without Triton there is none."""
    if not (INTERPRETED and find_spec("triton")):
        return ()
    from triton.runtime.errors import InterpreterError

    return (InterpreterError,)


@law("Autocast does not reduce the precision of the angles.", r"R x \text{ under autocast} = R x")
def autocast(subject, sizes):
    if subject.convention.autocasts:
        raise NotApplicable(f"{subject.convention.name}: its results have the dtype of autocast")

    def cast(subject, case):
        with torch.autocast(torch.device(subject.device).type, torch.bfloat16):
            return subject(case)

    yield from _same(subject, sizes, cast, "{} under autocast", "autocast")


@law("A low precision of matrix products does not reduce the precision of the angles.", r"R x \text{ in TF32} = R x")
def matmul_precision(subject, sizes):
    def medium(subject, case):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return subject(case)
        finally:
            torch.set_float32_matmul_precision(before)

    what = "{} with matrix products in medium precision"
    yield from _same(subject, sizes, medium, what, "the precision of matrix products")


FAR = 4099
"""A number of tokens whose last positions neither bfloat16 nor TF32 holds: rounded, they turn by other angles."""


def _same(subject, sizes, call: Callable, what: str, setting: str):
    """Compare results under a setting of torch with those without it.

    The caller asks for the setting, so a rotation by matrix products may follow it, and round x, cosines and sines. It
    is noted if far positions turn by the right angles; angles that follow the setting are wrong there.
    """
    outputs, case = call(subject, subject.draw(sizes, dtype=torch.float32)), subject.draw(sizes, dtype=torch.float32)
    parts = zip(subject(case), subject.expected(case), strict=True)
    found = list(against(case, outputs, [(exact(y), 2 * bound) for y, (_, bound) in parts], what))
    if all(y.dtype == torch.float32 for y in outputs) and all((one.excess <= 1).all() for one in found):
        yield from found
        return
    for extents in (sizes, replace(sizes, batch=1, tokens=FAR, q_heads=1, k_heads=1)):
        case = subject.draw(extents, dtype=torch.bfloat16)
        # Twice the bound of a rotation in 16 bits, because the operations of a product are in any order.
        truth = [(y, 2 * bound) for y, bound in replace(subject, lenient=True).expected(case)]
        case = replace(case, inputs=tuple(x.float() for x in case.inputs))
        yield from against(case, call(subject, case), truth, what, truth=True)
    raise Noted(f"it rotates by matrix products, which follow {setting}")


def _unchanged(subject, other, sizes, what):
    case = subject.cotangents(subject.draw(sizes))
    uncompiled = subject(case)
    if changed := ", ".join(sorted(subject.surroundings.changed)):
        raise NotApplicable(f"the function changes global state ({changed}), which torch.compile cannot follow")
    parts = zip(uncompiled, subject.expected(case), strict=True)
    yield from against(case, other(case), [(exact(y), 2 * bound) for y, (_, bound) in parts], what)
    if subject.convention.differentiable:
        truth = subject.expected(case, case.cotangents, transposed=True)
        parts = zip(subject.gradients(case)[1], truth, strict=True)
        expected = [(exact(d), 2 * bound) for d, (_, bound) in parts]
        yield from against(case, other.gradients(case)[1], expected, f"gradient of {what}")
