"""DeepSpeed's rotation over ropelab's kernel, and a patch that makes DeepSpeed use the kernel."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

from ropelab.call.traced import one_node
from ropelab.interop.broadcast import check_tables, rotate
from ropelab.interop.calls import Call, ForeignRotation, Kind, rotation_of
from ropelab.interop.patch import Patch, Place, places

RotationFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@one_node
def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``t`` by tables that broadcast against ``t``, in DeepSpeed's convention: split-half pairs.

    The result is ``t * cos + rotate_half(t) * sin`` for all shapes. One launch of the kernel computes the result where
    the tables change along one axis of ``t``, the sequence, or along two axes, batch and sequence. The docstring of
    DeepSpeed promises ``[s, b, h, d]`` with ``[s, 1, 1, r]``; DeepSpeed's FPDT layer and ``DistributedAttention`` pass
    ``[b, s, h, d]`` with ``[1, s, 1, r]`` (github.com/deepspeedai/DeepSpeed, deepspeed/sequence). For all other shapes
    torch operations compute the formula.

    Args:
        t: ``[..., d]``, any strides.
        freqs_cos, freqs_sin: cosines and sines (not angles), ``[..., r]`` with ``0 < r <= d`` even, a column for each
            feature. Features of ``t`` from r on pass unchanged.

    Returns:
        A tensor of the shape of ``t``, in the dtype to which ``t`` and the tables promote, as in DeepSpeed: for float16
        with float32 tables ``t`` is converted to float32 first. The kernel computes in float32 or wider and rounds
        once; DeepSpeed's own function rounds after every operation. The result is differentiable any number of times,
        also in the tables.

    Raises:
        TypeError: an argument is not a tensor, ``t`` holds bools, or the tables are not floating.
        ValueError: the tables have a wrong number of columns, shapes do not broadcast, or devices differ.
    """
    check_tables({"t": t}, {"freqs_cos": freqs_cos, "freqs_sin": freqs_sin})
    [y] = rotate([t], freqs_cos, freqs_sin)
    return y


@one_node
def fused_rope_forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k where DeepSpeed calls the optional package torchembed: ``torchembed._triton.fused_rope_forward``.

    DeepSpeed from 0.19.3 calls the function for tensors on the accelerator whose tables follow axis 0, and computes the
    formula otherwise (github.com/deepspeedai/DeepSpeed, commit 5ca819bc2, deepspeed/sequence/layer.py). `patch` puts
    this function there. It differs from torchembed 0.3.2 in three ways: the dtype of the result is the formula's, the
    tables may have any strides and gradients, and a ``k`` that is ``q`` is rotated once.

    Args:
        q, k: ``[..., s, r]``, any strides and any number of leading axes. DeepSpeed passes one tensor as both.
        cos, sin: ``[s, r]`` with ``r`` even, a column for each feature.

    Returns:
        ``(q, k)``, each in the dtype to which the tensor and the tables promote, and differentiable any number of
        times. If ``k`` is ``q``, both results are one tensor.

    Raises:
        TypeError: an argument is not a tensor, q or k holds bools, or the tables are not floating.
        ValueError: the tables have a wrong number of columns, shapes do not broadcast, or devices differ.
    """
    check_tables({"q": q, "k": k}, {"cos": cos, "sin": sin})
    q_out = _rotate_rows(q, cos, sin)
    return q_out, q_out if k is q else _rotate_rows(k, cos, sin)


def patch() -> Patch:
    """Make DeepSpeed rotate with the kernel: ``patch()``, or ``with patch(): ...``.

    The patch replaces ``apply_rotary_pos_emb`` of ``deepspeed.sequence.layer`` and ``apply_rotary_pos_emb_backward`` of
    ``deepspeed.sequence.fpdt_layer``, in each loaded module that has imported the function by its name. A call that one
    launch cannot compute goes to DeepSpeed's own function, and so does a call with wrong arguments. In DeepSpeed from
    0.19.3 `fused_rope_forward` takes the place of torchembed as well, whether torchembed is installed or not.

    A result has the dtype of DeepSpeed's result. With bfloat16 a result is closer to the definition than DeepSpeed's
    result, as DeepSpeed's own function rounds after every operation. A function that is patched several times stays so
    until all patches are undone.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: DeepSpeed's functions have another convention. The patch replaces nothing then.
    """
    layer = importlib.import_module("deepspeed.sequence.layer")
    functions = [(layer, "apply_rotary_pos_emb", False)]
    with contextlib.suppress(ImportError):  # an early DeepSpeed has no FPDT layer
        fpdt_layer = importlib.import_module("deepspeed.sequence.fpdt_layer")
        functions.append((fpdt_layer, "apply_rotary_pos_emb_backward", True))
    new: dict[Place, object] = {}
    for module, name, inverse in functions:
        original = getattr(module, name)
        new_function = original if rotation_of(original) else _rotation(module, name, inverse).over_kernel()
        new |= dict.fromkeys(places(name, original), new_function)
    if hasattr(layer, _AVAILABLE):
        new |= {(layer, "_torchembed_rope_forward"): fused_rope_forward, (layer, _AVAILABLE): True}
    return Patch(new)


_AVAILABLE = "_torchembed_available"
"""The flag of DeepSpeed that says whether the import of torchembed succeeded."""


def _rotate_rows(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`apply_rotary_pos_emb` of ``[..., s, r]`` by tables ``[s, r]``, in one launch for any number of leading axes."""
    batched = x.flatten(0, -3) if x.ndim > 3 else x
    return apply_rotary_pos_emb(batched, cos, sin).reshape(x.shape)


def _rotation(module: ModuleType, name: str, inverse: bool) -> ForeignRotation:
    """The rotation of halves that a function of DeepSpeed computes; ``inverse`` as for `ropelab.apply_rope`.

    Raises:
        ValueError: the function does not rotate halves by tables that broadcast.
    """
    function = getattr(module, name)
    names = tuple(inspect.signature(function).parameters)
    x, *tables = names if len(names) == 3 else ("t", "freqs_cos", "freqs_sin")
    calls = {(x, *tables): [_Broadcast((x,), "bshd", "1s1", tuple(tables))]}
    return ForeignRotation(
        f"{module.__name__}.{name}", function, calls, [Kind("split_half", "feature", inverse=inverse)]
    )


class _Broadcast(Call):
    """Tables of any number of axes, against tensors of any number of axes."""

    joined = True

    def broadcast(self, cos, sin, arguments):
        tensors = arguments[self.rotated[0]], cos, sin
        return (cos, sin) if all(isinstance(x, torch.Tensor) and x.ndim for x in tensors) else None
