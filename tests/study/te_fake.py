"""A stand-in for `ropelab.bench.peers.te_library.Library` on any device, made of the definition.

Like the library, it rotates forward or backward by tensors alone and leaves rows past the last sequence unwritten.
"""

import torch

from ropelab import PackedSequences, reference
from ropelab.positions.packed import context_parallel_positions


class FakeLibrary:
    """The functions of a library by the definition; ``calls`` holds the keyword arguments of every call."""

    def __init__(self):
        self.calls = []

    def rotate(self, x, freqs, tensor_format, *, interleaved=False, inverse=False, cu_seqlens=None,
               start_positions=None, cp_size=1, cp_rank=0):  # fmt: skip
        self.calls.append({"interleaved": interleaved, "inverse": inverse, "cp_size": cp_size, "cp_rank": cp_rank})
        where = {"cp_size": cp_size, "cp_rank": cp_rank}
        y = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
        if tensor_format == "thd":
            starts = 0 if start_positions is None else start_positions
            rows = int(cu_seqlens[-1]) // cp_size
            positions = PackedSequences(cu_seqlens, rows, offsets=starts, **where).positions
        else:
            s, b = (0, 1) if tensor_format == "sbhd" else (1, 0)
            rows = x.shape[0]
            positions = context_parallel_positions(x.shape[s] * cp_size, **where, device=x.device).expand(
                x.shape[b], -1
            )
            if start_positions is not None:
                positions = positions + start_positions[:, None]
        angles = freqs[:, 0, 0].double()
        y[:rows] = reference.rotate(
            x[:rows], angles.cos(), angles.sin(), layout="interleaved" if interleaved else "split_half",
            seq_format=tensor_format, positions=positions, inverse=inverse, rotary_slice=(0, freqs.shape[-1]),
        ).to(x.dtype)  # fmt: skip
        return y

    def rotate_qkv(self, qkv, q_freqs, k_freqs, widths, tensor_format, **options):
        lead, d = qkv.shape[:2], widths[1]
        q, k, v = qkv.split(widths, -1)
        rotated = [
            self.rotate(x.reshape(*lead, -1, d), freqs, tensor_format, **options)
            for x, freqs in ((q, q_freqs), (k, k_freqs))
        ]
        return *rotated, v.contiguous()

    def rotate_qkv_backward(self, gradients, q_freqs, k_freqs, widths, tensor_format, **options):
        q, k = (
            self.rotate(x, freqs, tensor_format, inverse=True, **options)
            for x, freqs in zip(gradients[:2], (q_freqs, k_freqs), strict=True)
        )
        return torch.cat((q.reshape(*k.shape[:3], widths[0]), k, gradients[2]), -1)
