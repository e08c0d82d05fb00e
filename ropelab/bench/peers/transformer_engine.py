"""Call TransformerEngine's kernels, which take float32 angles, as differentiable functions.

`apply_rotary_pos_emb` and `apply_fused_qkv_rotary_pos_emb` have the arguments of the functions of
``transformer_engine/pytorch/attention/rope.py`` (2.20) with ``fused=True``, after the library whose kernels run.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ropelab.bench.peers import te_library
from ropelab.bench.peers.peer import Rotate, float32_angles
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd

Context = Callable[[], AbstractContextManager]


class _Rotated(torch.autograd.Function):
    """One tensor; the gradient takes the same arguments, as FusedRoPEFunc does."""

    @staticmethod
    def forward(ctx, t, library, context, freqs, options):
        ctx.call = library, context, freqs, options
        with context():
            return library.rotate(t, freqs, **options)

    @staticmethod
    def backward(ctx, gradient):
        library, context, freqs, options = ctx.call
        with context():
            return library.rotate(gradient, freqs, **options, inverse=True), None, None, None, None


class _RotatedQKV(torch.autograd.Function):
    """A packed qkv; the gradient leaves start positions out, as FusedQKVRoPEFunc does."""

    @staticmethod
    def forward(ctx, qkv, library, freqs, widths, options):
        ctx.call = library, freqs, widths, {name: x for name, x in options.items() if name != "start_positions"}
        return library.rotate_qkv(qkv, *freqs, widths, **options)

    @staticmethod
    def backward(ctx, *gradients):
        library, freqs, widths, options = ctx.call
        gradients = [gradient.contiguous() for gradient in gradients]
        return library.rotate_qkv_backward(gradients, *freqs, widths, **options), None, None, None, None


def apply_rotary_pos_emb(
    library: te_library.Library,
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    context: Context = nullcontext,
) -> torch.Tensor:
    """The package's function of this name, with ``fused=True``; freqs of other dtypes are converted, as in the package.

    Args:
        library: the kernels. The other arguments are as for `te_library.Library.rotate`.
        context: returns a context for every call of the library, forward and backward.
    """
    options = {"tensor_format": tensor_format, "start_positions": start_positions, "interleaved": interleaved}
    options |= {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
    return _Rotated.apply(t, library, context, freqs.float(), options)


def apply_fused_qkv_rotary_pos_emb(
    library: te_library.Library,
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The package's function of this name. ``cu_seqlens`` has no effect, as in the package.

    Args:
        library: the kernels. The other arguments are as for `te_library.Library.rotate_qkv`.

    Raises:
        ValueError: start positions beside ``cp_size > 1``, which the package refuses.
    """
    if cp_size > 1 and start_positions is not None:
        raise ValueError("start_positions: expected None beside cp_size > 1, got a tensor")
    options = {"tensor_format": tensor_format, "start_positions": start_positions, "interleaved": interleaved}
    options |= {"cp_size": cp_size, "cp_rank": cp_rank}
    return _RotatedQKV.apply(qkv, library, (q_freqs.float(), k_freqs.float()), tuple(qkv_split_arg_list), options)


def angles(workload: Workload, device: torch.device | str) -> torch.Tensor:
    """The angles of the workload's positions in the package's form, float32 ``[S, 1, 1, rotary_dim]``."""
    half = float32_angles(workload, device)
    return pairing.join(half, half, workload.layout)[:, None, None].contiguous()


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind the kernels of a version of the package; q and k take a launch each, as in the package."""
    library = te_library.load(te_library.find(version))
    freqs, fmt = angles(workload, cos.device), workload.seq_format
    options = {"interleaved": workload.layout == "interleaved", "tensor_format": "bshd" if fmt == "bhsd" else fmt}
    if workload.lengths:
        options["cu_seqlens"] = workload.cu_seqlens(cos.device)

    def one(x):
        if x is None:
            return None
        if fmt == "bhsd":  # which the package lacks
            return from_bshd(apply_rotary_pos_emb(library, to_bshd(x, fmt), freqs, **options), fmt)
        return apply_rotary_pos_emb(library, x, freqs, **options)

    return lambda q, k: (one(q), one(k))
