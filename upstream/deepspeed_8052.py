"""DeepSpeed's `apply_rotary_pos_emb` beside its formula, for shapes that the gate of torchembed lets through or not.

With DeepSpeed and torchembed on a GPU the fused path is reached; without them every line says "equal" or "raises".
"""

import torch
from deepspeed.sequence.layer import apply_rotary_pos_emb

device = "cuda" if torch.cuda.is_available() else "cpu"


def formula(t, cos, sin):
    x0, x1 = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-x1, x0), dim=-1) * sin


def attempt(function, *tensors):
    try:
        return function(*tensors)
    except (RuntimeError, ValueError):
        return None


cases = {
    "t [s, h, d], tables [s, 1, d]": ((8, 4, 64), (8, 1, 64)),
    "t [s, h, d], tables [s, d], s = h": ((8, 8, 64), (8, 64)),
    "t [s, b, h, d], tables [s, 1, d], s = b": ((8, 8, 4, 64), (8, 1, 64)),
    "t [s, b, h, d], tables [s, d], s != h": ((8, 2, 4, 64), (8, 64)),
}
torch.manual_seed(0)
for name, (shape, table_shape) in cases.items():
    t = torch.randn(shape, device=device)
    angles = torch.arange(8.0, device=device)[:, None] * 10000 ** -(torch.arange(0, 64, 2, device=device) / 64)
    cos, sin = (torch.cat((table, table), dim=-1).view(table_shape) for table in (angles.cos(), angles.sin()))
    expected, actual = attempt(formula, t, cos, sin), attempt(apply_rotary_pos_emb, t, cos, sin)
    if expected is None:
        said = "both raise" if actual is None else "answers where the formula raises"
    else:
        said = "equal" if torch.allclose(actual, expected, atol=1e-5) else "different"
    print(f"{name}: {said}")
