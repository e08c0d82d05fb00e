"""Tables in float32 buffers, as pytorch#187286 describes them: what angles in float32 and a cast do, and `to_empty`."""

import torch


class Tables(torch.nn.Module):
    """Cosines of float32 angles in a buffer that is not persistent."""

    def __init__(self, rows, dim=128, base=10000):
        super().__init__()
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), frequencies)
        self.register_buffer("cos_cache", angles.cos(), persistent=False)


print("torch", torch.__version__)
for rows in (2048, 131072):
    frequencies = 10000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    exact = torch.outer(torch.arange(rows, dtype=torch.float64), frequencies).cos()
    tables = {
        "float32 angles": Tables(rows).cos_cache,
        "float32 angles, then .to(torch.bfloat16)": Tables(rows).to(torch.bfloat16).cos_cache,
        "float64 angles, rounded once": exact.float(),
    }
    for name, table in tables.items():
        print(f"{rows} rows, {name}: off by up to {(table.double() - exact).abs().max().item():.0e}")
print("tensors in the state_dict, which to_empty and load_state_dict would need:", len(Tables(8).state_dict()))
