"""This file executes the assembly of multi-head latent attention and its transpose, and makes both operators.

Plain tensors in eager mode bypass PyTorch's dispatcher, as in `operator`. ``options.rotary_slice`` is always
``(N, N + R)``: a head of the key has N features that do not rotate and R features that do.
"""

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from ropelab.arguments import check_tensor, dtype_name
from ropelab.call.angles import Tables
from ropelab.call.checks import INPLACE, check_places, check_rope_arguments, check_writable, read_tensors
from ropelab.call.launch_cache import LaunchCache, call_key
from ropelab.call.memory import DisjointCheck
from ropelab.call.operator import must_dispatch
from ropelab.call.options import Options
from ropelab.kernels import backend, uses_triton
from ropelab.kernels.rotation import row_count
from ropelab.layout.seq_format import rank, to_bshd


def run_forward(
    kv, k_pe, tables: Tables, positions, first_position: int, options: Options, copy_value: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assemble key and value: through the dispatcher if `must_dispatch`, else directly.

    Without ``copy_value`` the value is a view of kv.
    """
    arguments = kv, k_pe, tables, positions, first_position, options, copy_value
    if must_dispatch(kv, k_pe):
        check_latent_arguments(kv, k_pe, tables, positions, options)
        made = assemble_mla(kv, k_pe, *tables.tensors, positions, first_position, *_fields(options), copy_value)
    else:
        made = _executed_forward(*arguments)
    return made[0], made[1] if copy_value else kv[..., options.slice(0)[0] :]


def run_backward(
    key_grad, value_grad, tables: Tables, positions, first_position: int, options: Options
) -> Sequence[torch.Tensor]:
    """The gradients of kv and k_pe; ``options`` are the options of the transposed rotation."""
    if must_dispatch(key_grad, value_grad):
        where = *tables.tensors, positions, first_position
        return assemble_mla_backward(key_grad, value_grad, *where, *_fields(options))
    return _executed_backward(key_grad, value_grad, tables, positions, first_position, options)


def turn_tail(q, tables: Tables, positions, first_position: int, options: Options) -> None:
    """Rotate the last R features of every head of q in place. Their layout may change, unlike in `rotation.executed`.

    The function serves plain tensors.
    """
    key = call_key((q, positions), tables, "turn_tail", options)
    key = None if key is None else (key, tables.cos.shape)
    launch, check_memory = prepared_calls.get(key), memory_checks.get(key)
    if launch is None or check_memory is None:
        check_tail(q, tables, positions, options)
        check_memory = DisjointCheck({"q": q}, read_tensors(tables, positions, options), where=INPLACE)
    check_memory(q, *tables.tensors, positions)
    check_places(q, tables, positions, first_position, options)
    check_writable(q, None)
    if launch is None:
        launch = _prepare("turn_tail", key, (), (q,), tables, positions, options)
        memory_checks.put(key, check_memory)
    increment_version((q,))  # autograd does not see a kernel write
    launch((), (q,), tables, positions, first_position)


def _executed_forward(kv, k_pe, tables: Tables, positions, first_position, options: Options, copy_value: bool):
    key = call_key((kv, k_pe, positions), tables, "forward", options, copy_value)
    launch = prepared_calls.get(key)
    if launch is None:
        check_latent_arguments(kv, k_pe, tables, positions, options)
    check_places(kv, tables, positions, first_position, options)
    made = _empty_heads(kv, k_pe, options, copy_value)
    outs = made[0], made[1] if copy_value else None
    launch = launch or _prepare("forward", key, (kv, k_pe), outs, tables, positions, options)
    launch((kv, k_pe), outs, tables, positions, first_position)
    return made


def _executed_backward(key_grad, value_grad, tables: Tables, positions, first_position, options: Options):
    key = call_key((key_grad, value_grad, positions), tables, "backward", options)
    given, grads = (key_grad, value_grad), _empty_gradients(key_grad, value_grad, options)
    launch = prepared_calls.get(key) or _prepare("backward", key, given, grads, tables, positions, options)
    launch(given, grads, tables, positions, first_position)
    return grads


def _empty_heads(kv, k_pe, options: Options, copy_value: bool) -> list[torch.Tensor]:
    """The key and, with ``copy_value``, the value, both contiguous."""
    heads, nope_dim = kv.shape[:-1], options.slice(0)[0]
    key = kv.new_empty((*heads, nope_dim + k_pe.shape[-1]))
    return [key, kv.new_empty((*heads, kv.shape[-1] - nope_dim))] if copy_value else [key]


def _empty_gradients(key_grad, value_grad, options: Options) -> list[torch.Tensor]:
    """The gradients of kv and k_pe, both contiguous."""
    first, end = options.slice(0)
    heads = [*key_grad.shape[:-1]]
    kv_grad = key_grad.new_empty((*heads, first + value_grad.shape[-1]))
    heads[options.seq_format.index("h")] = 1
    return [kv_grad, key_grad.new_empty((*heads, end - first))]


prepared_calls: LaunchCache[Callable[..., None]] = LaunchCache()
memory_checks: LaunchCache[DisjointCheck] = LaunchCache()
"""The checks of the calls in place in `prepared_calls`."""


def _prepare(step: str, key, given, made, tables: Tables, positions, options: Options) -> Callable[..., None]:
    """Choose how ``step`` runs for tensors with these properties, and keep the choice under ``key``.

    Args:
        step: the name of a function of the backends: "forward", "backward" or "turn_tail".
        given, made: the tensors that the function reads, and the tensors that it writes, in its order.

    Returns:
        ``run(given, made, tables, positions, first_position)``
    """
    module, rotation = backend("latent", made[0]), options.rotation(tables)

    # A remembered function must keep no tensor alive, so these functions refer to no tensor of this call.
    def views(tensors, positions):
        tensors = [None if x is None else to_bshd(x, options.seq_format) for x in tensors]
        if positions is not None and not options.offsets:
            positions = positions.expand(tensors[0].shape[:2])
        return tensors, positions

    def run_backend(given, made, tables, positions, first_position) -> None:
        tensors, positions = views((*given, *made), positions)
        where = {"positions": positions, "first_position": first_position}
        getattr(module, step)(*tensors, tables.cos, tables.sin, rotation, **where)

    run = run_backend
    viewed, positions_viewed = views((*given, *made), positions)
    adjacent = all(x is None or x.stride(-1) == 1 for x in (*viewed, tables.cos, tables.sin))
    if uses_triton(made[0]) and adjacent and len(viewed[0]) <= module.MAX_BATCH:
        launch = getattr(module, f"plan_{step}")(*viewed, tables.cos, tables.sin, positions_viewed, rotation)

        def run_launch(given, made, tables, positions, first_position) -> None:
            cos, sin = tables.cos, tables.sin
            # The kernel ignores the tensor that stands in for missing positions.
            where = cos, sin, cos if positions is None else positions
            launch(*given, *made, *where, first_position, row_count(cos))

        run = run_launch
    prepared_calls.put(key, run)
    return run


# ------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("ropelab::assemble_mla", mutates_args=())
def assemble_mla(
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    out_layout: str,
    seq_format: str,
    rotary_slice: Sequence[int],
    offsets: bool,
    transpose: bool,
    copy_value: bool,
) -> list[torch.Tensor]:
    """The key and, with ``copy_value``, the value: the operator ``ropelab::assemble_mla``."""
    options = _options(layout, out_layout, seq_format, rotary_slice, offsets, transpose)
    return _executed_forward(kv, k_pe, Tables(cos, sin), positions, first_position, options, copy_value)


@assemble_mla.register_fake
def _(kv, k_pe, cos, sin, positions, first_position, *fields):
    return _empty_heads(kv, k_pe, _options(*fields[:-1]), copy_value=fields[-1])


@torch.library.custom_op("ropelab::assemble_mla_backward", mutates_args=())
def assemble_mla_backward(
    key_grad: torch.Tensor,
    value_grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    out_layout: str,
    seq_format: str,
    rotary_slice: Sequence[int],
    offsets: bool,
    transpose: bool,
) -> list[torch.Tensor]:
    """The gradients of kv and k_pe: the operator ``ropelab::assemble_mla_backward``."""
    options = _options(layout, out_layout, seq_format, rotary_slice, offsets, transpose)
    return _executed_backward(key_grad, value_grad, Tables(cos, sin), positions, first_position, options)


@assemble_mla_backward.register_fake
def _(key_grad, value_grad, cos, sin, positions, first_position, *fields):
    return _empty_gradients(key_grad, value_grad, _options(*fields))


def _fields(options: Options) -> tuple:
    """The fields of ``options`` that the operators take."""
    return options[:-1]


def _options(layout, out_layout, seq_format, rotary_slice: Sequence[int], offsets: bool, transpose: bool) -> Options:
    return Options(layout, out_layout, seq_format, (rotary_slice[0], rotary_slice[1]), offsets, transpose)


# ----------------------------------------------------------------------------------------------------------- checks


def check_tail(q, tables: Tables, positions, options: Options) -> None:
    """Raise TypeError or ValueError unless the rotary slice is the tail of the heads of q, and a rotation can serve q.

    The function looks at the metadata of the tensors only.
    """
    check_rope_arguments(q, None, tables, positions, options)
    end = options.slice(0)[1]
    if q.shape[-1] != end:
        raise ValueError(f"q: expected heads of nope_dim + rotary_dim = {end} features, got {q.shape[-1]}")


def check_latent_arguments(kv, k_pe, tables: Tables, positions, options: Options) -> None:
    """Raise TypeError or ValueError for arguments that the assembly of key and value cannot serve.

    The function looks at the metadata of the tensors only.
    """
    first, end = options.slice(0)
    seq_format = options.seq_format
    shape = f"{seq_format} of rank {rank(seq_format)}"
    check_tensor("kv", kv, (rank(seq_format),), shape)
    check_rope_arguments(k_pe, None, tables, positions, options._replace(rotary_slice=(0, end - first)))
    heads = [*kv.shape[:-1]]
    heads[seq_format.index("h")] = 1
    if [*k_pe.shape[:-1]] != heads:
        raise ValueError(f"k_pe: expected shape {(*heads, end - first)}, with one head, got {tuple(k_pe.shape)}")
    if kv.shape[-1] <= first:
        raise ValueError(f"kv: expected more than nope_dim = {first} features in a head, got {kv.shape[-1]}")
    if k_pe.dtype != kv.dtype:
        raise TypeError(f"k_pe: expected kv's dtype {dtype_name(kv.dtype)}, got {dtype_name(k_pe.dtype)}")
    if k_pe.device != kv.device:
        raise ValueError(f"k_pe: expected kv's device {kv.device}, got {k_pe.device}")
