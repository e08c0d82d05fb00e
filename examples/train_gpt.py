"""Train a small GPT on dense sequences, on packed sequences, and on packed sequences with torch.compile.

It takes some 100 s of CPU time on two cores, and there torch.compile needs a C++ compiler.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from ropelab import PackedSequences, apply_rope, rotary_table

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 16, 64, 4, 2, 256
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask, where):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k = apply_rope(q, k, **where)
        q, k, v = (heads.transpose(-3, -2) for heads in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)
        self.tables = dict(zip(("cos", "sin"), rotary_table(TOKENS, WIDTH // HEADS, device=device), strict=True))

    def forward(self, tokens, mask, **where):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask, self.tables | where)
        return self.head(self.norm(x))


def documents(*shape):
    """Two random tokens in turns: the model has to find the token before this one."""
    pattern = torch.randint(VOCABULARY, (*shape[:-1], 2), device=device)
    return pattern[..., torch.arange(shape[-1], device=device) % 2]


def dense():
    mask = torch.ones(64, 64, dtype=torch.bool, device=device).tril()
    return documents(TOKENS // 64, 64), mask, {"seq_format": "bshd"}


def packed():
    ends = torch.randperm(TOKENS - 1)[:3].sort().values + 1
    cu_seqlens = pad(torch.cat((ends, torch.tensor([TOKENS]))), (1, 0)).to(device, torch.int32)
    tokens = torch.cat([documents(length) for length in cu_seqlens.diff().tolist()])
    document = torch.searchsorted(cu_seqlens, torch.arange(TOKENS, device=device), right=True)
    mask = (document[:, None] == document).tril()
    positions = PackedSequences(cu_seqlens, total_tokens=TOKENS).positions  # 0, 1, ... in each document, for all layers
    return tokens, mask, {"seq_format": "thd", "positions": positions}


for name, batch, compiled in (("dense", dense, False), ("packed", packed, False), ("compiled", packed, True)):
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    logits = torch.compile(model, fullgraph=True) if compiled else model
    losses = []
    for _ in range(100):
        tokens, mask, where = batch()
        loss = cross_entropy(logits(tokens, mask, **where)[..., :-1, :].flatten(0, -2), tokens[..., 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{name:8} {device}: loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2
