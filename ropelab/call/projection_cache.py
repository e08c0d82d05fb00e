"""The projection to q, k and v with a rotation, whose k and v go into a paged cache, for plain tensors."""

from collections.abc import Callable

import torch

from ropelab.call.checks import check_places
from ropelab.call.operation import Tensors
from ropelab.call.paged_cache import WRITE
from ropelab.call.paged_cache_checks import NAMES, check_slots
from ropelab.call.projection import KERNEL, Call, Heads, Projection, factors, heads_like, heads_of, product
from ropelab.call.where import Options, Where


class _IntoCache(Projection):
    """The projection that writes k and v into a paged cache: by the kernel, or by a product and `WRITE`."""

    def by_kernel(self, path: str, tensors: Tensors, where: Where, heads: Heads, call: Call) -> Callable | None:
        """The launch of the kernel, or None where it does not serve the call."""
        outputs, (q_nope, _, q_weight, _, *scales) = tensors[2:_WRITES], tensors[_REST : len(_NAMES)]
        norm = call.norm
        normed = norm is None or (norm.weight_offset == 0 and norm.first and len(q_weight) == heads.dim)
        if path == "quack" or not normed or any(t is not None for t in (*outputs, q_nope, *scales)):
            return None
        launch = KERNEL.prepare(_for_kernel(tensors), where, heads, norm)
        return launch and (lambda tensors, *numbers: launch(_for_kernel(tensors), *numbers))

    def by_pass(self, tensors: Tensors, where: Where, heads: Heads, call: Call) -> Callable:
        """The launch of `WRITE`, behind the product of PyTorch."""
        shape = *tensors[_WRITES].shape[:-1], heads.q + 2 * heads.k, heads.dim

        def for_pass(tensors: Tensors, y: torch.Tensor) -> Tensors:
            q, *angles = tensors[len(_NAMES) :]
            caches, outputs, rest = tensors[:2], tensors[3:_WRITES], tensors[_REST : len(_NAMES)]
            return *caches, q, *outputs, *heads.apart(y), *rest, *angles

        write = WRITE.prepare(for_pass(tensors, tensors[_WRITES].new_empty(shape)), where, call.norm)

        def run(tensors: Tensors, first_position: int, rows: int) -> None:
            y = product(*factors(tensors[_WRITES:])).view(shape)
            write(for_pass(tensors, y), first_position, rows)

        return run


def _for_kernel(tensors: Tensors) -> Tensors:
    key_cache, value_cache, x, weight, bias = (tensors[i] for i in (0, 1, _WRITES, _WRITES + 1, _WRITES + 4))
    return key_cache, value_cache, x, weight, bias, *tensors[_SLOTS : _SLOTS + 3], *tensors[len(_NAMES) :]


def _check_into_cache(given: Tensors, where: Where, call: Call) -> None:
    q, kv = heads_like(given[_WRITES], heads_of(given[_WRITES:], call, where.options.seq_format))
    made = _make_query(given, where.options, call)
    WRITE.check((*given[:2], *made, *given[3:_WRITES], q, kv, kv, *given[_REST:]), where, call.norm)


def _make_query(given: Tensors, options: Options, call: Call) -> tuple[torch.Tensor]:
    if given[2] is not None:
        return (given[2],)
    x, weight, second = given[_WRITES : _WRITES + 3]
    dim = weight.shape[0] // (call.q_heads + 2 * call.k_heads if second is None else call.q_heads)
    return (x.new_empty((*x.shape[:-1], call.q_heads, dim)),)


def _check_contents(given, where: Where, *numbers) -> None:
    check_places(given[_WRITES].unsqueeze(-1), where)
    check_slots(given[_SLOTS], given[0].shape[0] * given[0].shape[1], "key_cache")


_WRITES = WRITE.writes
_NAMES = (
    *NAMES[:_WRITES], "x", "weight", "weight[1]", "weight[2]", "bias", "bias[1]", "bias[2]",
    *NAMES[NAMES.index("q_nope") :],
)  # fmt: skip
_REST, _SLOTS = _NAMES.index("q_nope"), _NAMES.index("slot_mapping")
INTO_CACHE = _IntoCache(
    KERNEL.module, KERNEL.step, KERNEL.tensors, _NAMES, _check_into_cache, _make_query,
    check_contents=_check_contents, writes=_WRITES, same={"q_nope_out": "q_nope"}, multiplies=True,
)  # fmt: skip
"""``(key_cache, value_cache, q_out, ...)``; it makes ``q_out`` where a call lacks it."""
