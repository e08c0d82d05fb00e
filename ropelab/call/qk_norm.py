"""This file executes the RMS norm with the rotation, and makes both directions operators of PyTorch's dispatcher."""

from collections.abc import Callable, Sequence

import torch

from ropelab.arguments import check_device, check_tensor, dtype_name
from ropelab.call.angles import Tables
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.launch_cache import LaunchCache, call_key
from ropelab.call.memory import empty_heads
from ropelab.call.operator import must_dispatch
from ropelab.call.options import Options
from ropelab.kernels import backend, uses_triton
from ropelab.kernels.rotation import row_count
from ropelab.layout.seq_format import to_bshd


def run_forward(
    q, k, q_weight, k_weight, tables: Tables, positions, first_position: int, options: Options, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize and rotate q and k: through the dispatcher if `must_dispatch`, else directly."""
    arguments = q, k, q_weight, k_weight
    if must_dispatch(q, k):
        check_qk_norm_arguments(*arguments, tables, positions, options)
        return qk_norm_rope(*arguments, *tables.tensors, positions, first_position, *_fields(options), eps)
    return _executed_forward(*arguments, tables, positions, first_position, options, eps)


def run_backward(
    q, k, q_grad, k_grad, q_weight, k_weight, tables: Tables, positions, first_position: int, options: Options,
    eps: float, weight_grads: bool,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """The gradients of q and k and, with ``weight_grads``, of their weights.

    The call goes through the dispatcher if `must_dispatch`.
    """
    tensors = q, k, q_grad, k_grad, q_weight, k_weight
    if must_dispatch(q, k):
        where = *tables.tensors, positions, first_position, *_fields(options)
        return qk_norm_rope_backward(*tensors, *where, eps, weight_grads)
    return _executed_backward(*tensors, tables, positions, first_position, options, eps, weight_grads)


def _executed_forward(q, k, q_weight, k_weight, tables: Tables, positions, first_position, options: Options, eps):
    key = call_key((q, k, q_weight, k_weight, positions), tables, "forward", options, eps)
    launch = prepared_calls.get(key)
    if launch is None:
        check_qk_norm_arguments(q, k, q_weight, k_weight, tables, positions, options)
    check_places(q, tables, positions, first_position, options)
    ys = empty_heads(q), empty_heads(k)
    pairs, weights = ((q, k), ys), ((q_weight, k_weight),)
    launch = launch or _prepare("forward", key, pairs, weights, tables, positions, options, eps)
    launch(pairs, weights, tables, positions, first_position)
    return ys


def _executed_backward(
    q, k, q_grad, k_grad, q_weight, k_weight, tables: Tables, positions, first_position, options: Options, eps: float,
    weight_grads: bool,
) -> Sequence[torch.Tensor]:  # fmt: skip
    tensors = q, k, q_grad, k_grad, q_weight, k_weight
    key = call_key((*tensors, positions), tables, "backward", options, eps, weight_grads)
    dxs, dws = (empty_heads(q), empty_heads(k)), None
    if weight_grads:
        dws = tuple(torch.empty_like(w, memory_format=torch.contiguous_format) for w in (q_weight, k_weight))
    pairs, weights = ((q, k), (q_grad, k_grad), dxs), ((q_weight, k_weight), dws)
    launch = prepared_calls.get(key) or _prepare("backward", key, pairs, weights, tables, positions, options, eps)
    launch(pairs, weights, tables, positions, first_position)
    return dxs + (dws or ())


prepared_calls: LaunchCache[Callable[..., None]] = LaunchCache()


def _prepare(
    step: str, key, pairs, weights, tables: Tables, positions, options: Options, eps: float
) -> Callable[..., None]:
    """Choose how ``step`` runs for tensors with these properties, and keep the choice under ``key``.

    Args:
        step: "forward" or "backward".
        pairs: pairs of a tensor for q and a tensor for k, in the order of the backend's arguments.
        weights: the weights of q and k and, in the backward, their gradients, or None if the gradients are not needed.

    Returns:
        ``run(pairs, weights, tables, positions, first_position)``
    """
    q = pairs[0][0]
    module, rotation = backend("qk_norm", q), options.rotation(tables)

    # A remembered function must keep no tensor alive, so these functions refer to no tensor of this call.
    def views(pairs, positions):
        pairs = [[to_bshd(x, options.seq_format) for x in pair] for pair in pairs]
        if positions is not None and not options.offsets:
            positions = positions.expand(pairs[0][0].shape[:2])
        return pairs, positions

    def run_backend(pairs, weights, tables, positions, first_position) -> None:
        pairs, positions = views(pairs, positions)
        where = {"positions": positions, "first_position": first_position}
        getattr(module, step)(*pairs, *weights, tables.cos, tables.sin, rotation, eps, **where)

    run = run_backend
    tensors = *(x for pair in pairs for x in pair), *weights[0], tables.cos, tables.sin
    viewed, positions_viewed = views(pairs, positions)
    if uses_triton(q) and all(x.stride(-1) == 1 for x in tensors) and len(viewed[0][0]) <= module.MAX_BATCH:
        plan = module.plan_forward if step == "forward" else module.plan_backward
        launch = plan(*viewed, *weights, tables.cos, tables.sin, positions_viewed, rotation, eps)

        def run_launch(pairs, weights, tables, positions, first_position) -> None:
            flat = [x for pair in pairs for x in pair]
            cos, sin = tables.cos, tables.sin
            # The kernel ignores the tensor that stands in for missing positions.
            where = cos, sin, cos if positions is None else positions
            launch(*flat, *weights[0], *weights[1:], *where, first_position, row_count(cos))

        run = run_launch
    prepared_calls.put(key, run)
    return run


# ------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("ropelab::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize and rotate q and k: the operator ``ropelab::qk_norm_rope``."""
    options = _options(layout, seq_format, rotary_slice, offsets)
    where = Tables(cos, sin), positions, first_position, options
    return _executed_forward(q, k, q_weight, k_weight, *where, eps)


@qk_norm_rope.register_fake
def _(q, k, *rest):
    return empty_heads(q), empty_heads(k)


@torch.library.custom_op("ropelab::qk_norm_rope_backward", mutates_args=())
def qk_norm_rope_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    eps: float,
    weight_grads: bool,
) -> list[torch.Tensor]:
    """The gradients of `qk_norm_rope`: the operator ``ropelab::qk_norm_rope_backward``."""
    where = Tables(cos, sin), positions, first_position, _options(layout, seq_format, rotary_slice, offsets)
    return list(_executed_backward(q, k, q_grad, k_grad, q_weight, k_weight, *where, eps, weight_grads))


@qk_norm_rope_backward.register_fake
def _(q, k, q_grad, k_grad, q_weight, k_weight, *rest):
    grads = [empty_heads(q), empty_heads(k)]
    return grads + ([torch.empty_like(q_weight), torch.empty_like(k_weight)] if rest[-1] else [])


def _fields(options: Options) -> tuple:
    """The fields of ``options`` that the operators take."""
    return options.layout, options.seq_format, options.rotary_slice, options.offsets


def _options(layout: str, seq_format: str, rotary_slice: Sequence[int] | None, offsets: bool) -> Options:
    slice_ = None if rotary_slice is None else (rotary_slice[0], rotary_slice[1])
    return Options(layout, layout, seq_format, slice_, offsets, False)


# ----------------------------------------------------------------------------------------------------------- checks


def check_qk_norm_arguments(q, k, q_weight, k_weight, tables: Tables, positions, options: Options) -> None:
    """Raise TypeError or ValueError for arguments that `apply_qk_norm_rope` cannot serve, judged by their metadata."""
    if k is None:
        raise TypeError("k: expected a torch.Tensor, got NoneType")
    check_rope_arguments(q, k, tables, positions, options)
    check_weights(q_weight, k_weight, q)


def check_weights(q_weight, k_weight, q) -> None:
    """Raise TypeError or ValueError unless the weights have an element for each feature of a head, and one dtype."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, (1,), f"({q.shape[-1]},), an element per feature of a head")
        if weight.shape[0] != q.shape[-1]:
            raise ValueError(
                f"{name}: expected shape ({q.shape[-1]},), an element per feature of a head, got {tuple(weight.shape)}"
            )
        check_device(name, weight, q)
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(
            f"k_weight: expected q_weight's dtype {dtype_name(q_weight.dtype)}, got {dtype_name(k_weight.dtype)}"
        )
