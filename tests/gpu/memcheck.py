"""Every kernel on shapes that end within a tile, to be run under compute-sanitizer: `python -m ropelab.study memcheck`.

PyTorch's memory cache is off there, so that every tensor is an allocation of its own, whose bounds are known.
"""

import itertools
from collections.abc import Sequence

import torch

import ropelab
from ropelab.kernels import INTERPRETED, projection_triton
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.run import run
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import from_bshd
from tests.ops.specs import OPERATORS, arguments, recorded
from tests.ops.test_projection_kernel import TILE, tensors

ROWS = 37
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(3, 11, 5, 3, 80), (1, 19, 3, 1, 256), (2, 7, 33, 2, 96), (1, 13, 4, 4, 72)]
"""(batch, seq_len, q_heads, k_heads, head_dim)."""


def draw(seq_format: str, batch: int, seq_len: int, heads: int, head_dim: int) -> torch.Tensor:
    x = torch.randn(batch, seq_len, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    return from_bshd(x, seq_format).contiguous().requires_grad_()


def backward(outputs, inputs) -> None:
    torch.autograd.grad(outputs, inputs, [torch.randn_like(y) for y in outputs])


def wild_positions(batch: int, seq_len: int) -> torch.Tensor:
    """Positions without a row, on both sides and as far as integers go: no kernel may look them up.

    A CPU refuses them, so there they have rows.
    """
    if DEVICE == "cpu":
        return torch.randint(0, ROWS - seq_len, (batch, seq_len))
    wild = torch.randint(-(2**31), 2**31, (batch, seq_len), device=DEVICE)
    wild[:, ::2] = torch.randint(-2 * ROWS, 2 * ROWS, wild[:, ::2].shape, device=DEVICE)
    return wild


def rotations(shapes: Sequence[tuple[int, ...]] = SHAPES) -> int:
    """Rotations and norms with their backwards; returns the number of calls."""
    cases = 0
    for (batch, seq_len, q_heads, k_heads, head_dim), layout in itertools.product(shapes, LAYOUTS):
        cos, sin = ropelab.rotary_table(ROWS, head_dim, device=DEVICE)
        for seq_format in ("bshd", "sbhd", "bhsd"):
            q, k = (draw(seq_format, batch, seq_len, heads, head_dim) for heads in (q_heads, k_heads))
            options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format}
            backward(ropelab.apply_rope(q, k, **options), (q, k))
            wild = wild_positions(batch, seq_len)
            backward(ropelab.apply_rope(q, k, positions=wild, **options), (q, k))
            backward(ropelab.apply_rope(q, k, offsets=wild[:, 0].clone(), **options), (q, k))
            frequencies = ropelab.rotary_frequencies(head_dim, device=DEVICE)
            without = {"frequencies": frequencies, "layout": layout, "seq_format": seq_format}
            backward(ropelab.apply_rope(q, k, positions=wild, **without), (q, k))
            weights = [torch.randn(head_dim, device=DEVICE, requires_grad=True) for _ in range(2)]
            leaves = (q, k, *weights)
            outputs = ropelab.apply_qk_norm_rope(*leaves, positions=wild, **options)
            torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs])
            cases += 5
    return cases


def packed(wild: Sequence[list[int]] = ([3, 9, 2, 2**31 - 1], [0, -4, 10**6, 2])) -> int:
    """Packed sequences, and boundaries of which no sequence can be made; returns the number of calls."""
    cases = 0
    for lengths in ([0, 5, 5, 12], *wild):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        sequences = ropelab.PackedSequences(cu_seqlens, 13, offsets=cu_seqlens[:-1])
        q = draw("thd", 1, 13, 3, 128)
        cos, sin = ropelab.rotary_table(ROWS, 128, device=DEVICE)
        backward([ropelab.apply_rope(q, cos=cos, sin=sin, seq_format="thd", positions=sequences.positions)], q)
        cases += 1
    return cases


def operators() -> int:
    """Every operator with its gradients, into caches with slots for some tokens; returns the number of calls."""
    cases = 0
    for name in OPERATORS:
        for tokens, heads, where in ((11, 5, "positions"), (1, 3, "start"), (17, 1, "positions")):
            recorded(name, arguments(name, where, tokens=tokens, heads=heads, device=DEVICE))
            cases += 1
    return cases


def products() -> int:
    """The product that rotates, with tiles that end beyond the tokens and the features; returns the number of calls."""
    cases = 0
    for norm, free, axes in ((False, False, None), (True, True, None), (True, False, (0, 1, 2) * 20 + (0,) * 4)):
        given = tensors(tokens=41, inputs=56, norm=norm, free=free, axes=axes)
        rotation = Rotation(128, interleaved=True, out_interleaved=True, table_free=free, axes=axes)
        run(projection_triton.plan_project, given, rotation, 3, 1, Norm(1e-6) if norm else None, TILE)
        cases += 1
    return cases


def main() -> None:
    cases = rotations() + packed() + operators() + products()
    torch.cuda.synchronize()
    print(f"{cases} cases")


if __name__ == "__main__":
    main()
