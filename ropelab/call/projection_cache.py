"""The projection to q, k and v with a rotation, whose k and v go into a paged cache, for plain tensors."""

import torch

from ropelab.call.checks import check_no_grad, check_places
from ropelab.call.operation import Operation, Tensors
from ropelab.call.paged_cache import WRITE
from ropelab.call.paged_cache_checks import NAMES, check_slots
from ropelab.call.projection import (
    KERNEL,
    aligned,
    check_served,
    heads_like,
    heads_of_arguments,
    product,
    size_of,
)
from ropelab.call.projection_paths import fastest
from ropelab.call.where import Where
from ropelab.kernels import Norm


def run_into_cache(
    given: Tensors, where: Where, q_heads: int, k_heads: int, norm: Norm | None, path: str, key: tuple | None
):
    """q ``[..., q_heads, D]``; k and v go into a paged cache.

    Args:
        given: plain tensors in the order of the names of `INTO_CACHE`, and None for those that a call lacks.
        path: "auto", "pass" or "product".
        key: of `Operation.look_up`.
    """
    check_no_grad(INTO_CACHE.names, given, where)
    numbers = q_heads, k_heads, norm, path, aligned(*given[_WRITES : _WRITES + 2])
    (q,) = INTO_CACHE(given, where, *numbers)
    INTO_CACHE.remember(key, given, where, *numbers)
    return q


class _IntoCache(Operation):
    """The projection that writes k and v into a paged cache: by the kernel, or by a product and `WRITE`."""

    def prepare(self, tensors: Tensors, where: Where, *numbers):
        """As of `Operation`; the numbers are those of `run_into_cache`, and whether x and the weight are `aligned`."""
        q_heads, k_heads, norm, path, _ = numbers
        outputs, x, weights, biases, rest, _ = _parts(tensors)
        heads = heads_of_arguments(x, weights, biases, q_heads, k_heads, where.options.seq_format)
        chosen = fastest(size_of(x, heads), x.device) if path == "auto" else path
        if chosen == "product":
            q_nope, _, q_weight, _, *scales = rest
            normed = norm is None or (norm.weight_offset == 0 and norm.first and len(q_weight) == heads.dim)
            alone = len(weights) == 1 and all(t is None for t in (*outputs[2:], q_nope, *scales))
            launch = super().prepare(_for_kernel(tensors), where, heads, norm) if normed and alone else None
            if launch is not None:
                return lambda tensors, *numbers: launch(_for_kernel(tensors), *numbers)
            check_served(path)
        shape = (*x.shape[:-1], heads.q + 2 * heads.k, heads.dim)

        def for_pass(parts, y: torch.Tensor) -> Tensors:
            (key_cache, value_cache, _, *outputs), _, _, _, rest, (q, *angles) = parts
            return key_cache, value_cache, q, *outputs, *heads.apart(y), *rest, *angles

        write = WRITE.prepare(for_pass(_parts(tensors), x.new_empty(shape)), where, norm)

        def run(tensors, first_position: int, rows: int) -> None:
            parts = _parts(tensors)
            write(for_pass(parts, product(*parts[1:4]).view(shape)), first_position, rows)

        return run


def _parts(tensors: Tensors) -> tuple:
    """What a call writes, x, the weights, the biases, the other given tensors, and q and the angles that follow."""
    x, *others = tensors[_WRITES : _WRITES + 7]
    weights, biases = ([t for t in part if t is not None] for part in (others[:3], others[3:]))
    return tensors[:_WRITES], x, weights, biases, tensors[_WRITES + 7 : len(_NAMES)], tensors[len(_NAMES) :]


def _for_kernel(tensors: Tensors) -> Tensors:
    key_cache, value_cache, x, weight, bias = (tensors[i] for i in (0, 1, _WRITES, _WRITES + 1, _WRITES + 4))
    return key_cache, value_cache, x, weight, bias, *tensors[_SLOTS : _SLOTS + 3], *tensors[len(_NAMES) :]


def _check_into_cache(given, where: Where, q_heads: int, k_heads: int, norm: Norm | None, *numbers) -> None:
    (key_cache, value_cache, _, *outputs), x, weights, biases, rest, _ = _parts(given)
    heads = heads_of_arguments(x, weights, biases, q_heads, k_heads, where.options.seq_format)
    (q, kv), made = heads_like(x, heads), _make_query(given, where, q_heads, k_heads)
    WRITE.check((key_cache, value_cache, *made, *outputs, q, kv, kv, *rest), where, norm)


def _make_query(given, where: Where, q_heads: int, k_heads: int, *numbers) -> tuple[torch.Tensor]:
    if given[2] is not None:
        return (given[2],)
    x, weight, second = given[_WRITES : _WRITES + 3]
    dim = weight.shape[0] // (q_heads + 2 * k_heads if second is None else q_heads)
    return (x.new_empty((*x.shape[:-1], q_heads, dim)),)


def _check_contents(given, where: Where, *numbers) -> None:
    check_places(given[_WRITES].unsqueeze(-1), where)
    check_slots(given[_SLOTS], given[0].shape[0] * given[0].shape[1], "key_cache")


_WRITES = WRITE.writes
_NAMES = (
    *NAMES[:_WRITES], "x", "weight", "weight[1]", "weight[2]", "bias", "bias[1]", "bias[2]",
    *NAMES[NAMES.index("q_nope") :],
)  # fmt: skip
_SLOTS = _NAMES.index("slot_mapping")
INTO_CACHE = _IntoCache(
    KERNEL.module, KERNEL.step, KERNEL.tensors, _NAMES, _check_into_cache, _make_query, KERNEL.numbers,
    _check_contents, _WRITES, {"q_nope_out": "q_nope"},
)  # fmt: skip
