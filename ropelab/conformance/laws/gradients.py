"""The laws of gradients: the gradient applies the transposed rotation to any cotangent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.autograd import backward, grad

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Broken, NotApplicable, Noted
from ropelab.conformance.law import AXES, Comparison, against, law, names
from ropelab.conformance.laws.robustness import three_heads
from ropelab.conformance.tensors import copied
from ropelab.conformance.words import said

ADJOINT = r"\langle R x, g \rangle = \langle x, R^\top g \rangle"


@law("The gradient applies the transpose: <Rx, g> = <x, R'g> for a random cotangent g.", ADJOINT)
def adjoint(subject, sizes):
    yield from _adjoint(subject, subject.cotangents(subject.draw(sizes)))
    n, packed = sizes.tokens, replace(sizes, batch=1, tokens=sizes.tokens + 3)
    others = [subject.draw(sizes, **w) for w in ({"offsets": 3}, {"factor": 1.25})]
    others += [subject.draw(sizes, offsets=tuple(range(9, 9 - 2 * sizes.batch, -2)))]
    others += [subject.draw(packed, lengths=(3, n), **w) for w in ({}, {"offsets": (4, 1)})]
    others += [subject.draw(replace(sizes, tokens=8), shard=(2, 1))]
    for other in others:
        if subject.can(other):
            yield from _adjoint(subject, subject.cotangents(other))
    odd = three_heads(sizes)
    try:
        comparisons = list(_adjoint(subject, subject.cotangents(subject.draw(odd))))
    except (Broken, NotApplicable):
        raise
    except Exception as refusal:  # a function may know certain heads only
        yield f"refuses {odd} ({type(refusal).__name__})"
        return
    yield from comparisons


@law("The gradient is right for the cotangent of a sum: one number, expanded with strides of 0.", ADJOINT)
def adjoint_expanded(subject, sizes):
    case = subject.draw(sizes)
    one = torch.tensor(0.75, dtype=subject.dtype, device=subject.device)
    yield from _adjoint(subject, replace(case, cotangents=tuple(one.expand_as(x) for x in case.inputs)))


@law("The gradient is right for cotangents that lie in memory in another order, or with gaps.", ADJOINT)
def adjoint_strided(subject, sizes):
    case = subject.cotangents(subject.draw(sizes))
    yield from _adjoint(subject, replace(case, cotangents=tuple(_gaps(g) for g in case.cotangents)))
    yield from _adjoint(subject, replace(case, cotangents=tuple(_reordered(g) for g in case.cotangents)))


def _gaps(g: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in every second element of larger memory."""
    wide = torch.full((*g.shape[:-1], 2 * g.shape[-1]), float("nan"), dtype=g.dtype, device=g.device)
    wide[..., ::2] = g
    return wide[..., ::2]


def _reordered(g: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with features outermost in memory and tokens innermost."""
    return g.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)


def _adjoint(subject, case):
    outputs, gradients = subject.gradients(case)
    forward = subject.expected(case)
    backward = subject.expected(case, case.cotangents, transposed=True)
    parts = zip(names(case), case.inputs, outputs, case.cotangents, gradients, forward, backward, strict=True)
    for name, x, y, g, d, (_, y_bound), (_, d_bound) in parts:
        x, y, g, d = map(exact, (x, y, g, d))
        bound = (abs(g) * y_bound + abs(x) * d_bound).sum(-1)
        yield Comparison(f"<{name}, its gradient>", (x * d).sum(-1), (y * g).sum(-1), bound, case, AXES[:3])


@law("A gradient reaches every token of every input.", r"R^\top g \ne 0")
def gradients_reach_inputs(subject, sizes):
    case = subject.cotangents(subject.draw(sizes))
    _, gradients = subject.gradients(case)
    for name, d in zip(names(case), gradients, strict=True):
        reached = (exact(d) != 0).any(-1).astype(float)
        ones, exactly = np.ones_like(reached), np.zeros(1)
        yield Comparison(f"whether a gradient reaches {name}", reached, ones, exactly, case, AXES[:3])


@law("An input's gradient does not depend on whether the other input needs one, or on the use of its result.",
     r"\nabla_q \langle R q, g \rangle = R^\top g \text{ for any } k")  # fmt: skip
def lone_gradients(subject, sizes):
    subject.require_gradients()
    subject.require_pair()
    case = subject.cotangents(subject.draw(sizes))
    both = zip(subject.gradients(case)[1], subject.expected(case, case.cotangents, transposed=True), strict=True)
    expected = [(exact(d), 2 * bound) for d, (_, bound) in both]
    for which, name in enumerate(names(case)):
        other = names(case)[1 - which]
        for needed, where in ((False, f"{other} needs no gradient"), (True, f"the result of {other} is not used")):
            inputs = [x.detach().requires_grad_(needed or i == which) for i, x in enumerate(case.inputs)]
            made = zip(subject(replace(case, inputs=tuple(inputs))), case.cotangents, strict=True)
            used = [(y, copied(g)) for i, (y, g) in enumerate(made) if y.requires_grad and (i == which or not needed)]
            d = None
            if used:
                ys, gs = zip(*used, strict=True)
                with subject.surroundings.theirs():
                    (d,) = grad(ys, inputs[which], gs, allow_unused=True)
            if d is None:
                raise Broken(f"{name} gets no gradient where {where}")
            yield Comparison(f"gradient of {name} where {where}", exact(d), *expected[which], case)


@law("Cosines and sines that require a gradient get it: y is linear in them.",
     r"\langle \nabla_{cs}, c' s' \rangle = \langle R' x, g \rangle")  # fmt: skip
def table_gradients(subject, sizes):
    subject.require_gradients()
    case = subject.cotangents(subject.draw(sizes))
    for other in (subject, replace(subject, base=100 * subject.base)):
        results = [(exact(y), 2 * bound) for y, (_, bound) in zip(other(case), other.expected(case), strict=True)]
        parts = zip(names(case), along_each_table(subject, case, other), products(case, results), strict=True)
        shares = {table: products(case, half) for table, half in _halves(other, case).items()}
        for number, (name, found, (right, bound)) in enumerate(parts):
            whole = exact(torch.stack(list(found.values())).sum(0))
            wrong = {}
            if abs(whole - right) > bound and found.keys() == shares.keys():  # the definition tells which table's
                told = {table: (exact(d), *shares[table][number]) for table, d in found.items()}
                wrong = {table: part for table, part in told.items() if abs(part[0] - part[1]) > part[2]}
            for table, (d, share, near) in (wrong or {"tables": (whole, right, bound)}).items():
                times = _times(float(d[0]), float(share[0]), float(near[0])) if wrong else ""
                what = f"<{table}, their gradient from {name}{times}>"
                yield Comparison(what, d, share, near, case, ("of all",))


def _halves(subject, case) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the parts of the results that the cosines make, and those that the sines make, with twice their bound.

    The inverse rotation has the same cosines and minus the sines.
    """
    both = zip(subject.expected(case), subject.expected(replace(case, inverse=not case.inverse)), strict=True)
    found = [((y + z) / 2, (y - z) / 2, 2 * bound) for (y, bound), (z, _) in both]
    return {"cosines": [(c, b) for c, _, b in found], "sines": [(s, b) for _, s, b in found]}


def _times(found: float, right: float, bound: float) -> str:
    """Return in words that a derivative is a simple multiple of the right one; empty if it is right, or no multiple."""
    if abs(found - right) <= bound:
        return ""
    factor = next((f for f in (-1.0, 0.0, 2.0, 0.5, -2.0) if abs(found - f * right) <= max(1.0, abs(f)) * bound), None)
    return {None: "", -1.0: ", which has the wrong sign", 0.0: ", which is zero"}.get(
        factor, f", which is {factor:g} times the right one" if factor is not None else ""
    )


def products(case, results) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ``<y, g>`` over the features that rotate, ``[1]`` for each input, and its bound in `along_tables`.

    Each entry of a table's gradient is a sum over sequences, heads and both members of a pair. The rounding of each
    addition is at most the bound of ``y``, times the cotangent.

    Args:
        case: the call, with cotangents.
        results: ``(y, bound)`` for each input.
    """
    found = []
    for (y, bound), g in zip(results, case.cotangents, strict=True):
        g, rotates = exact(g), slice(0, case.rotary_dim)
        terms = 2 * g.shape[0] * g.shape[2]
        both = (g * y, (terms + 1) * abs(g) * bound)
        right, allowed = (values[..., rotates].sum(keepdims=True).reshape(1) for values in both)
        found.append((right, allowed))
    return found


def along_tables(subject, case, other) -> list[torch.Tensor]:
    """Return the derivatives ``[1]`` of ``<y, g>`` for each input along all tables together; see `along_each_table`."""
    return [sum(found.values(), torch.zeros(1)) for found in along_each_table(subject, case, other)]


def along_each_table(subject, case, other) -> list[dict[str, torch.Tensor]]:
    """Return the derivatives ``[1]`` of ``<y, g>``, for each input, along each table, to tables of the same shapes.

    Two tables, of which one alone has zeros, are the cosines and the sines: sines are zero at position 0.

    Results are linear in the tables. So the derivatives are the `products` of results with the other tables.

    Args:
        case: the call, with cotangents.
        other: the subject with the frequencies of the other tables.

    Raises:
        NotApplicable: the caller passes no tables, tables are constants in the convention, or the function refuses
            tables that require a gradient.
        Noted: no table gets a gradient, and the convention does not say whether tables are constants.
        Broken: a table gets no gradient, and another table or the convention says that it should.
    """
    subject.require_gradients()
    if subject.convention.computes_cosines:
        raise NotApplicable(f"{subject.convention.name}: the caller passes no cosines and sines")
    # Of a leaf that needs no gradient, autograd allows one view to be overwritten by what needs one, and no second.
    kept = replace(case, inputs=tuple(copied(x.detach().requires_grad_()) for x in case.inputs))
    arguments, along = subject.arguments(kept), other.arguments(kept).others()
    tables = {n: t.requires_grad_() for n, t in arguments.others().items() if t.is_floating_point() or t.is_complex()}
    try:
        outputs = subject.call(kept, arguments)
    except (NotApplicable, Broken):
        raise
    except Exception as refusal:  # no result, so no gradient that could be wrong
        reason = f"refuses tables that require a gradient ({type(refusal).__name__})"
        raise NotApplicable(reason) from refusal
    found = []
    for y, g in zip(outputs, case.cotangents, strict=True):
        gradients: tuple = (None,) * len(tables)
        if y.requires_grad:
            try:
                with subject.surroundings.theirs():
                    gradients = grad(y, tuple(tables.values()), copied(g), allow_unused=True, retain_graph=True)
            except Exception as refusal:  # in place, the result may overwrite the x that the gradient of a table needs
                raise NotApplicable(f"refuses tables that require a gradient ({said(refusal)})") from refusal
        if subject.convention.constant_tables is not False and all(d is None for d in gradients):
            if subject.convention.constant_tables:
                raise NotApplicable(f"{subject.convention.name}: its tables are constants")
            raise Noted("it takes cosines and sines as constants, which get no gradient")
        for name, d in zip(tables, gradients, strict=True):
            if d is None:
                raise Broken(f"{name} requires a gradient and gets none")
        products = ((d * along[n].conj()).real for n, d in zip(tables, gradients, strict=True))
        found.append({n: p.double().sum()[None] for n, p in zip(_named(tables), products, strict=True)})
    return found


def _named(tables: dict[str, torch.Tensor]) -> list[str]:
    zeros = [bool((table == 0).any()) for table in tables.values()]
    return ["sines" if zero else "cosines" for zero in zeros] if sorted(zeros) == [False, True] else list(tables)


@law("The gradient can be differentiated in turn: it is linear in g, with R as its transpose.",
     r"\nabla_g \langle R^\top g, h \rangle = R h")  # fmt: skip
def second_order(subject, sizes):
    if subject.once:
        raise NotApplicable("declared to be differentiable once")
    case = subject.cotangents(subject.draw(sizes))
    case = replace(case, cotangents=tuple(g.requires_grad_() for g in case.cotangents))
    direction = subject.cotangents(case, seed=2).cotangents
    try:
        _, gradients = subject.gradients(case, create_graph=True)
        if not all(d.requires_grad for d in gradients):
            raise Broken("the gradient has no grad_fn: derivatives of it are lost, without an error")
        with subject.surroundings.theirs():
            second = grad(gradients, case.cotangents, direction)
    except (Broken, NotApplicable):
        raise
    except Exception as refusal:
        raise Noted(f"it refuses second derivatives ({said(refusal)})") from refusal
    forward = replace(case, inputs=direction, cotangents=())
    parts = zip(subject(forward), subject.expected(forward), strict=True)
    yield from against(case, second, [(exact(y), 2 * bound) for y, (_, bound) in parts], "second derivative of {}")


@law("A second training step with the same tables has the same gradients as the first step.", r"R^\top g = R^\top g")
def second_backward(subject, sizes):
    subject.require_gradients()
    case = subject.cotangents(subject.draw(sizes))
    tracked = replace(case, inputs=tuple(x.detach().requires_grad_() for x in case.inputs))
    arguments = subject.arguments(tracked)
    bounds = [bound for _, bound in subject.expected(case, case.cotangents, transposed=True)]
    steps = []
    for _ in range(2):
        if subject.in_place:  # autograd does not allow an in-place change of a leaf
            steps.append(subject.gradients(case)[1])
            continue
        outputs = subject.call(tracked, arguments)
        if not all(y.requires_grad for y in outputs):
            raise Broken("the output has no grad_fn: autograd has no record of the function, and no gradient arrives")
        with subject.surroundings.theirs():
            backward(outputs, case.cotangents)  # into parameters of a module as well
        steps.append([x.grad for x in tracked.inputs])
        for x in tracked.inputs:
            x.grad = None
    expected = [(exact(d), 2 * bound) for d, bound in zip(steps[0], bounds, strict=True)]
    yield from against(case, steps[1], expected, "gradient of {} in the second step")
