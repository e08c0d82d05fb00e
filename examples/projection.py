"""A block whose projection to q, k and v also rotates q and k: forward and backward, within a derived bound.

Write u for the unit roundoff of the sums (float32) and s for that of the stored dtype. Every result of `qkv_rope` is a
sum of n products, then for q and k a rotation ``y0 c - y1 s`` of two such sums, and is stored once or twice:

- a sum of n products is off by at most 2 n u times the sum of their magnitudes; the factor 2 is for tensor cores,
- a rotation rounds each of its two terms twice, and |c|, |s| <= 1: both magnitudes and 2 u,
- each store rounds by s.

The gradient has the same steps in the other order. All in all: ``(2 n u + 2 u + 2 s)`` times the magnitudes, to first
order; a twentieth on top of that is ample for the higher orders, since n u and s are below 2^-8.

It takes some 3 s of CPU time on two cores.
"""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from ropelab import apply_rope, qkv_rope, rotary_table

Q_HEADS, K_HEADS, HEAD_DIM, WIDTH = 16, 4, 64, 256
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype, tokens = (torch.bfloat16, 4096) if device == "cuda" else (torch.float32, 128)
cos, sin = rotary_table(tokens, HEAD_DIM, device=device)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums stay in float32


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (Q_HEADS + 2 * K_HEADS) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(Q_HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = qkv_rope(x, self.qkv.weight, q_heads=Q_HEADS, k_heads=K_HEADS, cos=cos, sin=sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def definition(x, weight):
    """q, k and v in three steps."""
    q, k, v = linear(x, weight).unflatten(-1, (-1, HEAD_DIM)).split((Q_HEADS, K_HEADS, K_HEADS), dim=2)
    return *apply_rope(q, k, cos=cos.to(x.dtype), sin=sin.to(x.dtype)), v


def magnitudes(heads):
    """``[..., D]``: the sum of the magnitudes of both features of a pair."""
    halves = heads.abs().unflatten(-1, (2, -1)).sum(-2)
    return torch.cat((halves, halves), dim=-1)


torch.manual_seed(0)
block = Attention().to(device, dtype)
x = torch.randn(1, tokens, WIDTH, device=device, dtype=dtype, requires_grad=True)
block(x).square().mean().backward()  # a step of training: one pass of the backward makes the gradient of the product
assert x.grad.isfinite().all() and block.qkv.weight.grad.isfinite().all()

exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, block.qkv.weight))
exact = definition(exact_x, exact_weight)
actual = qkv_rope(x, block.qkv.weight, q_heads=Q_HEADS, k_heads=K_HEADS, cos=cos, sin=sin)
cotangents = [torch.randn_like(heads) for heads in actual]
exact_gradients = torch.autograd.grad(exact, (exact_x, exact_weight), [g.double() for g in cotangents])
gradients = torch.autograd.grad(actual, (x, block.qkv.weight), cotangents)

ax, aw = exact_x.detach().abs()[0], exact_weight.detach().abs()
heads = (ax @ aw.T).unflatten(-1, (-1, HEAD_DIM))[None].split((Q_HEADS, K_HEADS, K_HEADS), dim=2)
turned = [*map(magnitudes, heads[:2]), heads[2]]
g = [*map(magnitudes, cotangents[:2]), cotangents[2].abs()]
ag = torch.cat(g, dim=2)[0].flatten(1).double()
u, s = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
sizes = [(turned[i], WIDTH) for i in range(3)] + [((ag @ aw)[None], len(aw)), (ag.T @ ax, tokens)]
names = ("q", "k", "v", "gradient of x", "gradient of the weight")
for name, ours, right, (size, n) in zip(names, (*actual, *gradients), (*exact, *exact_gradients), sizes, strict=True):
    share = ((ours.double() - right).abs() / (1.05 * (2 * n * u + 2 * u + 2 * s) * size)).max().item()
    print(f"{device} {dtype}: {name} is off by at most {share:.1%} of the bound")
    assert share <= 1
