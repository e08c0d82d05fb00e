"""This file executes the rotation that also writes into a paged cache, and makes it an operator of the dispatcher."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ropelab.call.angles import angles_of
from ropelab.call.checks import check_places
from ropelab.call.launch_cache import LaunchCache, call_key
from ropelab.call.memory import DisjointCheck, check_disjoint, is_same_view
from ropelab.call.operator import must_dispatch
from ropelab.call.options import Options
from ropelab.call.paged_cache_arguments import PagedCacheCall
from ropelab.call.paged_cache_checks import (
    IN_PLACE,
    check_call,
    check_no_grad,
    check_slots,
    check_written,
    read,
    written,
)
from ropelab.kernels import backend, uses_triton
from ropelab.kernels.paged_cache import Norm, Scales, Tensors
from ropelab.layout.seq_format import to_bshd


def run(call: PagedCacheCall) -> None:
    """Make the call: through the dispatcher if `must_dispatch`, else directly."""
    t = call.tensors
    check_no_grad(call)
    if not must_dispatch(t.q, t.k):
        return _executed(call)
    check_call(call)
    if not torch.compiler.is_compiling():  # compilers cannot follow this check
        check_disjoint(written(call), read(call), IN_PLACE)
    # Compilers follow no operator that writes over its own input, so the operator gets new tensors there.
    in_place = {name: out for name, out, x in _outputs(t) if is_same_view(out, x)}
    new = t._replace(**{name: torch.empty_like(out) for name, out in in_place.items()})
    options = call.options
    rope_and_cache(
        *new, *call.weights, *call.scales, *call.angles.tensors, call.positions, call.first_position,
        options.layout, options.seq_format, options.rotary_slice, options.offsets, *call.numbers,
    )  # fmt: skip
    for name, out in in_place.items():
        out.copy_(getattr(new, name))


def _outputs(t: Tensors) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The outputs that the caller asked for: name, output and input."""
    pairs = (
        ("q_out", t.q_out, t.q), ("k_out", t.k_out, t.k), ("v_out", t.v_out, t.v),
        ("q_nope_out", t.q_nope_out, t.q_nope),
    )  # fmt: skip
    return [(name, out, x) for name, out, x in pairs if out is not None and x is not None]


class Prepared(NamedTuple):
    """The launch of a call, and the check of the memory that it writes."""

    launch: Callable[[PagedCacheCall], None]
    check_memory: DisjointCheck


prepared_calls: LaunchCache[Prepared] = LaunchCache()


def _executed(call: PagedCacheCall) -> None:
    t = call.tensors
    key = _key(call)
    prepared = prepared_calls.get(key)
    if prepared is None:
        check_call(call)
        check_memory = DisjointCheck(written(call), read(call), IN_PLACE)
    else:
        check_memory = prepared.check_memory
    check_memory(*_in_order(call))
    check_places(t.q, call.angles, call.positions, call.first_position, call.options)
    check_slots(t)
    check_written(t)
    if prepared is None:
        prepared = Prepared(_prepare(call), check_memory)
        prepared_calls.put(key, prepared)
    outputs = [x for x in (t.q_out, t.k_out, t.v_out, t.k_cache, t.v_cache, t.q_nope_out) if x is not None]
    increment_version(outputs)  # autograd does not see a kernel write
    prepared.launch(call)


def _in_order(call: PagedCacheCall) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the order of `written` and `read`, without the time that the names take."""
    t = call.tensors
    return (
        t.k_cache, t.v_cache, t.q_out, t.k_out, t.v_out, t.q_nope_out, t.q, t.k, t.v, t.q_nope, t.slots,
        *call.weights, *call.scales, *call.angles.named.values(), call.positions,
    )  # fmt: skip


def _key(call: PagedCacheCall) -> Hashable | None:
    """The key of a call; None as for `call_key`. The check of memory depends on the number of rows, too."""
    key = call_key(
        (*call.tensors, *call.weights, *call.scales, call.positions), call.angles, call.options, *call.numbers
    )
    return None if key is None else (key, call.angles.tensors[0].shape)


def _prepare(call: PagedCacheCall) -> Callable[[PagedCacheCall], None]:
    """Choose how calls with these properties run. The function keeps no tensor of this call alive."""
    module, rotation = backend("paged_cache", call.tensors.q), call.options.rotation(call.angles)
    tensors, positions = _views(call)
    inputs = tensors.q, tensors.k, tensors.v, tensors.q_nope, *call.weights, *call.angles.for_kernels
    is_ready = all(x is None or x.stride(-1) == 1 for x in inputs) and uses_triton(tensors.q)
    if is_ready and len(tensors.q) <= module.MAX_BATCH:
        cos, sin = call.angles.for_kernels
        launch = module.plan(tensors, cos, sin, positions, rotation, call.norm, call.scales)

        def run_launch(call: PagedCacheCall) -> None:
            # A launch takes addresses only, so the order of the axes does not matter.
            launch(call.tensors, *call.angles.for_kernels, call.positions, call.first_position, call.norm, call.scales)

        return run_launch

    def run_backend(call: PagedCacheCall) -> None:
        tensors, positions = _views(call)
        where = {"positions": positions, "first_position": call.first_position}
        module.write(tensors, *call.angles.for_kernels, rotation, call.norm, call.scales, **where)

    return run_backend


def _views(call: PagedCacheCall) -> tuple[Tensors, torch.Tensor | None]:
    """The tensors as ``[B, S, H, D]`` and the positions as ``[B, S]``, as the backends take them."""
    t, seq_format = call.tensors, call.options.seq_format
    per_token = ("q", "k", "v", "q_out", "k_out", "v_out", "q_nope", "q_nope_out")
    views = {name: to_bshd(x, seq_format) for name in per_token if (x := getattr(t, name)) is not None}
    positions = call.positions
    if positions is not None and not call.options.offsets:
        positions = positions.expand(views["q"].shape[:2])
    return t._replace(**views), positions


@torch.library.custom_op(
    "ropelab::rope_and_cache", mutates_args=("q_out", "k_out", "v_out", "key_cache", "value_cache", "q_nope_out")
)
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_nope: torch.Tensor | None,
    q_nope_out: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    eps: float,
    weight_offset: float,
    norm_first: bool,
) -> None:
    """Rotate and write into caches: the operator ``ropelab::rope_and_cache``, which returns nothing."""
    slice_ = None if rotary_slice is None else (rotary_slice[0], rotary_slice[1])
    norm = None
    if q_weight is not None and k_weight is not None:
        norm = Norm(q_weight, k_weight, eps, weight_offset, norm_first)
    tensors = Tensors(q, k, v, q_out, k_out, v_out, key_cache, value_cache, slot_mapping, q_nope, q_nope_out)
    options, scales = Options(layout, layout, seq_format, slice_, offsets, False), Scales(q_scale, k_scale, v_scale)
    _executed(PagedCacheCall(tensors, angles_of(cos, sin), positions, first_position, options, norm, scales))


@rope_and_cache.register_fake
def _(*arguments) -> None:
    """The operator writes to its arguments and returns nothing."""
