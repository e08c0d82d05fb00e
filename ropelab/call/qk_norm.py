"""The RMS norm with the rotation, for plain tensors, and both directions as operators of PyTorch's dispatcher."""

import torch

from ropelab.arguments import check_device, check_dtype, check_tensor
from ropelab.call.checks import check_rope_arguments
from ropelab.call.memory import empty_heads
from ropelab.call.operation import Operation
from ropelab.call.where import Options, Where
from ropelab.kernels.tensors import NormGradients, NormTensors


def check_qk_norm_arguments(given, where: Where, eps: float = 0.0) -> None:
    """Raise TypeError or ValueError for arguments that `apply_qk_norm_rope` cannot serve, judged by their metadata."""
    q, k, q_weight, k_weight = given
    if k is None:
        raise TypeError("k: expected a torch.Tensor, got NoneType")
    check_rope_arguments(q, k, where)
    check_weights(q_weight, k_weight, q)


def _make_results(given, options: Options, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_heads(given[0]), empty_heads(given[1])


def _make_gradients(given, options: Options, eps: float, weight_grads: bool) -> tuple[torch.Tensor | None, ...]:
    q, k, _, _, *weights = given
    made = [torch.empty_like(w, memory_format=torch.contiguous_format) if weight_grads else None for w in weights]
    return empty_heads(q), empty_heads(k), *made


FORWARD = Operation(
    "qk_norm", "forward", NormTensors, ("q", "k", "q_weight", "k_weight"), check_qk_norm_arguments, _make_results
)
FORWARD.operator("ropelab::qk_norm_rope", "float eps", "(Tensor, Tensor)")
BACKWARD = Operation(
    "qk_norm", "backward", NormGradients, ("q", "k", "q_grad", "k_grad", "q_weight", "k_weight"),
    lambda given, where, *numbers: None, _make_gradients, numbers=lambda eps, weight_grads: (eps,),
)  # fmt: skip
BACKWARD.operator("ropelab::qk_norm_rope_backward", "float eps, bool weight_grads", "Tensor[]")


def check_weights(q_weight, k_weight, q) -> None:
    """Raise TypeError or ValueError unless the weights have an element for each feature of a head, and one dtype."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, (1,), f"({q.shape[-1]},), an element per feature of a head")
        if weight.shape[0] != q.shape[-1]:
            raise ValueError(
                f"{name}: expected shape ({q.shape[-1]},), an element per feature of a head, got {tuple(weight.shape)}"
            )
        check_device(name, weight, q)
    check_dtype("k_weight", k_weight, q_weight, "q_weight")
