"""The circumstances in which a call of an operator may be wrong: the calls of an identification and of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase
from ropelab.conformance.cache.laws import beyond, of_every_size, with_yarn
from ropelab.conformance.cache.subject import CacheSubject
from ropelab.kernels.float8 import FLOAT8_DTYPES

BLOCKS = (32, 8)
"""Numbers of slots of a block beside the usual 16."""

Draw = Callable[..., CacheCase]


def circumstances(subject: CacheSubject) -> dict[str, Draw]:
    """Return circumstances in words -> a function that draws such a call; most calls come first."""
    kind = subject.convention

    def drawn(change: Callable[[CacheCase], CacheCase] = lambda case: case, **fixed) -> Draw:
        return lambda *of, **options: change(subject.draw(*of, **options | fixed))

    found = {"": drawn(), "where every token has a slot": drawn(skipped=False)}
    if kind.own_angles:
        found["where the call asks for YaRN"] = drawn(with_yarn)
    if kind.optional_norm:
        found["without a norm"] = drawn(norm=False)
    if kind.norm:
        found["for heads of small numbers"] = drawn(
            lambda case: replace(case, inputs=tuple(x * 2.0**-10 for x in case.inputs))
        )
    if kind.offset:
        found["where the weights have an offset"] = drawn(weight_offset=1.0)
    for size in BLOCKS if kind.addressed else ():
        found[f"in caches with blocks of {size} slots"] = drawn(block_size=size)
    for order in kind.orders[1:]:
        found[f"in caches in {order}"] = drawn(order=order)
    if kind.widths_differ:
        found["where heads of v have another width"] = drawn(wider=8)
    if kind.fewer_slots:
        found["in a call with fewer slots than tokens"] = drawn(
            lambda case: replace(case, slots=case.slots[: case.tokens // 2])
        )
    if isinstance(kind, BlockScales):
        return found | {"for heads of every size, from zeros to large numbers": drawn(of_every_size)}
    for dtype in FLOAT8_DTYPES:
        name = f"in caches of {str(dtype).removeprefix('torch.')}"
        found[name] = drawn(cache_dtype=dtype)
        if not kind.turns_cached:
            found[f"{name} beyond the largest number"] = drawn(beyond, cache_dtype=dtype)
    return found
