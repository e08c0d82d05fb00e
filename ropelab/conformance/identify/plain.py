"""Facts that wrong numbers show without a model of the rotation: constants, factors, copies, the order of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from ropelab.conformance.identify.angles import simple

FEW = 3
"""The number of places that are listed, and the fewest numbers that show a factor."""

Source = tuple[str, np.ndarray, np.ndarray]
"""The name of a result, its right numbers and their bound ``[..., D]``."""


def plain(
    y: np.ndarray, wrong: np.ndarray, sources: Sequence[Source], given: Mapping[str, np.ndarray],
    nouns: Sequence[str], rotary_dim: int, labels: np.ndarray | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield predicates of a wrong result, each of which reproduces all of its wrong numbers.

    Args:
        y: the result, ``[..., D]``.
        wrong: which of its numbers are wrong.
        sources: the right results of the call, its own first.
        given: numbers in words that the result may have unchanged, of the shape of ``y``.
        nouns: the names of the axes.
        rotary_dim: the number of features that rotate.
        labels: the numbers that places of the first axis are told by; by default their own.
    """
    if not wrong.any():
        return
    _, right, bound = sources[0]
    constants = {"is NaN, or was not written,": np.isnan(y), "is zero": y == 0}
    constants |= {f"is {words}, unchanged,": y == same for words, same in given.items() if same.shape == y.shape}
    for words, hit in constants.items():
        if hit[wrong].all():
            yield f"{words} {_where(wrong, hit, nouns, labels)}".rstrip(" ,")
    sure = wrong & (abs(right) > 0.1)
    several = sure.sum() >= FEW  # a single number is always some multiple
    ratio = float(np.median((y[sure] / right[sure]).astype(np.float64))) if several else 0.0
    factor = simple(ratio) if np.isfinite(ratio) else 0.0
    near = abs(y - factor * right) <= (1 + abs(factor)) * bound
    if factor not in (0, 1) and near[wrong].all():
        yield f"is {factor:g} times the right result {_where(wrong, near, nouns, labels)}".rstrip()
    yield from _copied(y, wrong, sources, nouns)
    order = feature_order(y, right, bound)
    if order is not None and order != list(range(len(order))):
        yield f"has the right numbers in other features: {order_words(order, rotary_dim)}"


def _copied(y: np.ndarray, wrong: np.ndarray, sources: Sequence[Source], nouns: Sequence[str]) -> Iterator[str]:
    """Yield that each wrong head of a token has the right numbers of another place."""
    own, _, near = sources[0]
    alike = [source for source in sources if source[1].shape[-1] == y.shape[-1]]
    found: dict[tuple[str, ...], set[tuple[tuple[int, int], ...]]] = {}
    for place in (tuple(map(int, at)) for at in np.argwhere(wrong.any(axis=-1))):
        hits = ((name, (abs(x - y[place]) <= bound + near[place]).all(axis=-1)) for name, x, bound in alike)
        name, hit = next(((name, hit) for name, hit in hits if hit.any()), ("", None))
        if hit is None:
            return
        places = [tuple(map(int, at)) for at in np.argwhere(hit)]
        at = min(places, key=partial(_distance, place))
        moved = [(noun, i, j) for noun, i, j in zip(nouns, place, at, strict=False) if i != j]
        key = ("" if name == own else name, *(noun for noun, _, _ in moved))
        found.setdefault(key, set()).add(tuple((i, j) for _, i, j in moved))
    if len(found) == 1 and (key := next(iter(found))) != ("",):
        moves = [
            ", ".join(f"of {noun} {j} in {noun} {i}" for noun, (i, j) in zip(key[1:], move, strict=True))
            for move in sorted(found[key])
        ]
        more = f" and {len(moves) - FEW} more" if len(moves) > FEW else ""
        yield f"has the result {f'of {key[0]} ' * bool(key[0])}{'; '.join(moves[:FEW])}{more}".rstrip()


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(i != j for i, j in zip(one, other, strict=True))


def feature_order(y: np.ndarray, right: np.ndarray, bound: np.ndarray) -> list[int] | None:
    """Return for each feature of ``y [..., D]`` the feature of the right result that it is; None if it is none."""
    order = []
    for feature in range(y.shape[-1]):
        near = (abs(right - y[..., feature, None]) <= 2 * bound + bound[..., feature, None]).reshape(-1, y.shape[-1])
        hits = np.flatnonzero(near.all(axis=0))
        if not len(hits):
            return None
        order.append(int(feature if feature in hits else hits[0]))
    return order


def order_words(order: list[int], rotary_dim: int) -> str:
    """Return in words which features of the right result stand in the features 0, 1, ..."""
    width = len(order)
    shift = order[0]
    if order == [(i + shift) % width for i in range(width)]:
        if shift == rotary_dim:
            return f"the {rotary_dim} features that rotate come behind the {width - rotary_dim} that pass"
        return f"feature i is feature (i + {shift}) mod {width}"
    moved = [(i, j) for i, j in enumerate(order) if i != j]
    listed = ", ".join(f"{i} is {j}" for i, j in moved[:8])
    return f"feature {listed}" + (f" and {len(moved) - 8} more" if len(moved) > 8 else "")


def listed(numbers: np.ndarray) -> str:
    """Return numbers one after another; a run of more than three as its first and its last."""
    numbers = numbers.reshape(-1)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    told = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run.tolist()))]
    return ", ".join(told[:9]) + (", ..." if len(told) > 9 else "")


def _where(wrong: np.ndarray, hit: np.ndarray, nouns: Sequence[str], labels: np.ndarray | None = None) -> str:
    """Return parts that contain all wrong numbers, such that the statement holds for every number of each part.

    Args:
        wrong: which numbers are wrong.
        hit: the numbers for which the statement holds.
        nouns, labels: as for `plain`.
    """
    parts = list(islice(_parts(wrong, hit, tuple(range(wrong.ndim))), FEW + 1))
    if len(parts) > FEW:
        every = [np.flatnonzero(wrong.any(axis=tuple(i for i in range(wrong.ndim) if i != axis)))
                 for axis in range(wrong.ndim)]  # fmt: skip
        within = said(every, wrong.shape, nouns, labels)
        return f"in {wrong.sum()} numbers{f', all of them {within}' if within else ''}"
    return " and ".join(said(part, wrong.shape, nouns, labels) for part in parts)


def _parts(wrong: np.ndarray, hit: np.ndarray, axes: tuple[int, ...]) -> Iterator[list[np.ndarray]]:
    """Yield the indices of parts along each axis: all wrong numbers, or else alike places of the first axis."""
    every = [np.flatnonzero(wrong.any(axis=tuple(i for i in range(wrong.ndim) if i != axis)))
             for axis in range(wrong.ndim)]  # fmt: skip
    if hit[np.ix_(*every)].all():
        yield every
        return
    for axis in axes:
        groups: dict[bytes, list[int]] = {}
        for index in every[axis].tolist():
            groups.setdefault(np.take(wrong, index, axis).tobytes(), []).append(index)
        if len(groups) > 1:
            for indices in groups.values():
                own = np.zeros(wrong.shape[axis], bool)
                own[indices] = True
                shape = [1] * wrong.ndim
                shape[axis] = -1
                yield from _parts(wrong & own.reshape(shape), hit, tuple(i for i in axes if i != axis))
            return
    yield from ([np.array([i]) for i in at] for at in np.argwhere(wrong))


def said(part: list[np.ndarray], shape: tuple[int, ...], nouns: Sequence[str], labels: np.ndarray | None = None) -> str:
    """Return in words the indices of a part along each axis; empty for the whole."""
    found = []
    for axis, (noun, numbers, size) in enumerate(zip(nouns, part, shape, strict=True)):
        if len(numbers) < size:
            told = numbers if axis or labels is None else np.sort(labels[numbers])
            found.append(f"{noun}{'s' * (len(numbers) > 1)} {listed(told)}")
    return f"in {' of '.join(reversed(found))}" if found else ""
