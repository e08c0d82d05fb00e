"""The assembly of multi-head latent attention and its transpose, for plain tensors and as operators of the dispatcher.

``where.options.rotary_slice`` is always ``(N, N + R)``: a head of the key has N features that do not rotate and R
features that do.
"""

import torch

from ropelab.arguments import check_like
from ropelab.call.checks import INPLACE, check_rope_arguments
from ropelab.call.operation import Operation
from ropelab.call.where import Options, Where
from ropelab.kernels.tensors import LatentGradients, LatentTensors, TailTensors
from ropelab.layout.seq_format import check_heads


def check_tail(q: torch.Tensor, where: Where) -> None:
    """Raise TypeError or ValueError unless the rotary slice is the tail of the heads of q, and a rotation can serve q.

    The function looks at the metadata of the tensors only.
    """
    check_rope_arguments(q, None, where)
    end = where.options.slice(0)[1]
    if q.shape[-1] != end:
        raise ValueError(f"q: expected heads of nope_dim + rotary_dim = {end} features, got {q.shape[-1]}")


def check_latent_arguments(given, where: Where, copy_value: bool = True) -> None:
    """Raise TypeError or ValueError for arguments that the assembly of key and value cannot serve.

    The function looks at the metadata of the tensors only.
    """
    kv, k_pe = given
    (first, end), seq_format = where.options.slice(0), where.options.seq_format
    check_heads("kv", kv, seq_format)
    if end - first < 2 or (end - first) % 2:
        raise ValueError(f"k_pe: expected a positive even number of features, got {end - first}")
    check_rope_arguments(k_pe, None, where._replace(options=where.options._replace(rotary_slice=(0, end - first))))
    heads = [*kv.shape[:-1]]
    heads[seq_format.index("h")] = 1
    if [*k_pe.shape[:-1]] != heads:
        raise ValueError(f"k_pe: expected shape {(*heads, end - first)}, with one head, got {tuple(k_pe.shape)}")
    if kv.shape[-1] <= first:
        raise ValueError(f"kv: expected more than nope_dim = {first} features in a head, got {kv.shape[-1]}")
    check_like("k_pe", k_pe, kv, "kv")


def _make_heads(given, options: Options, copy_value: bool) -> list[torch.Tensor | None]:
    """The key and, with ``copy_value``, the value, both contiguous."""
    kv, k_pe = given
    heads, nope_dim = kv.shape[:-1], options.slice(0)[0]
    key = kv.new_empty((*heads, nope_dim + k_pe.shape[-1]))
    return [key, kv.new_empty((*heads, kv.shape[-1] - nope_dim)) if copy_value else None]


def _make_gradients(given, options: Options) -> list[torch.Tensor]:
    """The gradients of kv and k_pe, both contiguous."""
    key_grad, value_grad = given
    (first, end), heads = options.slice(0), [*key_grad.shape[:-1]]
    kv_grad = key_grad.new_empty((*heads, first + value_grad.shape[-1]))
    heads[options.seq_format.index("h")] = 1
    return [kv_grad, key_grad.new_empty((*heads, end - first))]


ASSEMBLE = Operation(
    "latent", "forward", LatentTensors, ("kv", "k_pe"), check_latent_arguments, _make_heads,
    numbers=lambda copy_value: (),
)  # fmt: skip
ASSEMBLE.operator("ropelab::assemble_mla", "bool copy_value", "Tensor[]")
ASSEMBLE_BACK = Operation(
    "latent", "backward", LatentGradients, ("key_grad", "value_grad"), lambda given, where: None, _make_gradients
)
ASSEMBLE_BACK.operator("ropelab::assemble_mla_backward", "", "Tensor[]")
TURN_TAIL = Operation(
    "latent", "turn_tail", TailTensors, ("q",), lambda given, where: check_tail(given[0], where), writes=1,
    condition=INPLACE, heads=(0,),
)  # fmt: skip
"""The rotation of the last R features of every head in place. Their layout may change, unlike in `rotation`."""
