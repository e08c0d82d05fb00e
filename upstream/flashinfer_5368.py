"""QK norm, NeoX RoPE, q and a paged K/V cache from a packed qkv in one call, in bfloat16 and in float8_e4m3fn."""

import torch

from ropelab import apply_qk_norm_rope, rope_and_cache, rotary_table

device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, q_heads, k_heads, head_dim, blocks, block_size = 100, 64, 8, 128, 16, 16
torch.manual_seed(0)
qkv = torch.randn(tokens, q_heads + 2 * k_heads, head_dim, device=device, dtype=torch.bfloat16)
q, k, v = qkv.split((q_heads, k_heads, k_heads), dim=1)  # views: nothing is copied
weights = [torch.rand(head_dim, device=device, dtype=torch.bfloat16) + 0.5 for _ in range(2)]
cos, sin = rotary_table(4096, head_dim, base=1e6, device=device)
positions = torch.randint(4096, (tokens,), device=device)
slots = torch.randperm(blocks * block_size, device=device)[:tokens]
shape = (blocks, block_size, k_heads, head_dim)
where = {"cos": cos, "sin": sin, "positions": positions}

expected_q, expected_k = apply_qk_norm_rope(q, k, *weights, seq_format="thd", **where)

caches = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
q_out = rope_and_cache(q, k, v, *caches, slots, q_weight=weights[0], k_weight=weights[1], **where)
unit = torch.finfo(torch.bfloat16).eps  # both round once to bfloat16, so they differ by at most one step
for actual, right in ((q_out, expected_q), (caches[0].flatten(0, 1)[slots], expected_k)):
    assert ((actual - right).abs() <= unit * right.abs()).all()
assert torch.equal(caches[1].flatten(0, 1)[slots], v)

# The same in 8 bits: a scale for each head of q of each token is made in the pass, K and V have static scales.
caches = [torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
q8, q_scales = torch.empty_like(q, dtype=torch.float8_e4m3fn), torch.empty(tokens, q_heads, device=device)
scales = {"k_scale": torch.tensor(0.05, device=device), "v_scale": torch.tensor(0.02, device=device)}
rope_and_cache(q, k, v, *caches, slots, q_weight=weights[0], k_weight=weights[1], q_out=q8, q_scale_out=q_scales,
               **scales, **where)  # fmt: skip
stored = caches[0].flatten(0, 1)[slots].float() * scales["k_scale"]
pairs = ((q8.float() * q_scales[..., None], expected_q, q_scales[..., None]), (stored, expected_k, scales["k_scale"]))
for actual, right, scale in pairs:
    bound = 2**-4 * right.float().abs() + 2**-10 * scale  # half a step of e4m3, of normal and of subnormal numbers
    assert ((actual - right.float()).abs() <= 1.01 * bound + unit * right.float().abs()).all()
print(f"{device}: one call in bfloat16 and one in float8_e4m3fn agree with norm, rotation and write as separate steps")
