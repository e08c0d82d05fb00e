"""Count the bytes that autograd keeps for the backward of a projection with a rotation."""

from collections.abc import Callable

import pandas as pd
import torch

import ropelab

TOKENS, INPUTS, Q_HEADS, K_HEADS, HEAD_DIM = 24, 64, 4, 2, 16


def kept_bytes() -> pd.DataFrame:
    """Bytes for a token, in units of K e and N e, that a call keeps besides weights, tables and positions.

    A row for each way: ``qkv_rope``, and a linear layer with ``apply_rope`` or ``apply_qk_norm_rope``; each with a norm
    and without. Every storage counts once.
    """
    outputs = (Q_HEADS + 2 * K_HEADS) * HEAD_DIM
    x, weight = (torch.randn(n, INPUTS, requires_grad=True) for n in (TOKENS, outputs))
    norms = [torch.ones(HEAD_DIM, requires_grad=True) for _ in range(2)]
    tables = dict(zip(("cos", "sin"), ropelab.rotary_table(TOKENS, HEAD_DIM), strict=True))
    shape = {"seq_format": "thd", "positions": torch.arange(TOKENS), **tables}
    heads = {"q_heads": Q_HEADS, "k_heads": K_HEADS}

    def apart(normed: bool):
        q, k, v = (x @ weight.T).unflatten(-1, (-1, HEAD_DIM)).split((Q_HEADS, K_HEADS, K_HEADS), -2)
        turned = ropelab.apply_qk_norm_rope(q, k, *norms, **shape) if normed else ropelab.apply_rope(q, k, **shape)
        return *turned, v

    ways: dict[str, Callable] = {
        "qkv_rope": lambda: ropelab.qkv_rope(x, weight, **heads, **shape),
        "linear layer, apply_rope": lambda: apart(False),
        "qkv_rope with norms": lambda: ropelab.qkv_rope(
            x, weight, q_weight=norms[0], k_weight=norms[1], **heads, **shape
        ),
        "linear layer, apply_qk_norm_rope": lambda: apart(True),
    }
    given = {t.untyped_storage().data_ptr() for t in (weight, *norms, *tables.values(), shape["positions"])}
    rows = []
    for name, call in ways.items():
        found: dict[int, int] = {}

        def keep(t: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            results = call()
        is_x, rest = x.untyped_storage().data_ptr(), 4 * TOKENS * outputs
        others = sum(size for at, size in found.items() if at not in given and at != is_x)
        rows.append({"way": name, "of x, K β": int(is_x in found), "others, N β": others / rest})
        del results
    return pd.DataFrame(rows)
