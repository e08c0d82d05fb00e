"""Every kernel on shapes that end within a tile, to be run under compute-sanitizer: `make memcheck`.

PyTorch's memory cache is off there, so that every tensor is an allocation of its own, whose bounds are known.
"""

import itertools

import torch

import ropelab
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import from_bshd

ROWS = 37


def draw(seq_format: str, batch: int, seq_len: int, heads: int, head_dim: int) -> torch.Tensor:
    x = torch.randn(batch, seq_len, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    return from_bshd(x, seq_format).contiguous().requires_grad_()


def backward(outputs, inputs) -> None:
    torch.autograd.grad(outputs, inputs, [torch.randn_like(y) for y in outputs])


def main() -> None:
    cases = 0
    shapes = [(3, 11, 5, 3, 80), (1, 19, 3, 1, 256), (2, 7, 33, 2, 96), (1, 13, 4, 4, 72)]
    for (batch, seq_len, q_heads, k_heads, head_dim), layout in itertools.product(shapes, LAYOUTS):
        cos, sin = ropelab.rotary_table(ROWS, head_dim, device="cuda")
        for seq_format in ("bshd", "sbhd", "bhsd"):
            q, k = (draw(seq_format, batch, seq_len, heads, head_dim) for heads in (q_heads, k_heads))
            options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format}
            backward(ropelab.apply_rope(q, k, **options), (q, k))
            # Positions without a row, on both sides and as far as integers go: no kernel may look them up.
            wild = torch.randint(-(2**31), 2**31, (batch, seq_len), device="cuda")
            wild[:, ::2] = torch.randint(-2 * ROWS, 2 * ROWS, wild[:, ::2].shape, device="cuda")
            backward(ropelab.apply_rope(q, k, positions=wild, **options), (q, k))
            backward(ropelab.apply_rope(q, k, offsets=wild[:, 0].clone(), **options), (q, k))
            frequencies = ropelab.rotary_frequencies(head_dim, device="cuda")
            without = {"frequencies": frequencies, "layout": layout, "seq_format": seq_format}
            backward(ropelab.apply_rope(q, k, positions=wild, **without), (q, k))
            weights = [torch.randn(head_dim, device="cuda", requires_grad=True) for _ in range(2)]
            leaves = (q, k, *weights)
            outputs = ropelab.apply_qk_norm_rope(*leaves, positions=wild, **options)
            torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs])
            cases += 5
    for lengths in ([0, 5, 5, 12], [3, 9, 2, 2**31 - 1], [0, -4, 10**6, 2]):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        packed = ropelab.PackedSequences(cu_seqlens, 13, offsets=cu_seqlens[:-1])
        q = draw("thd", 1, 13, 3, 128)
        cos, sin = ropelab.rotary_table(ROWS, 128, device="cuda")
        backward([ropelab.apply_rope(q, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)], q)
        cases += 1
    torch.cuda.synchronize()
    print(f"{cases} cases")


if __name__ == "__main__":
    main()
