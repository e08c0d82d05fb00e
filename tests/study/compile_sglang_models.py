"""Compile the model of a persistent kernel for an H200 that need not be there: it writes as wide as it says.

Run as a script by test_sglang.py: compiling needs a process in which kernels are not interpreted.
"""

import re
from types import SimpleNamespace

import torch

from ropelab.bench.compiled import compiled
from ropelab.study.documents.sglang import models

TOKENS, Q_HEADS, K_HEADS, HEAD_DIM = 64, 32, 8, 128
WIDTH = {"b16": 2, "b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16}


def main() -> None:
    q, k = (torch.empty(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (Q_HEADS, K_HEADS))
    table = torch.empty(TOKENS, HEAD_DIM // 2, dtype=torch.bfloat16)
    for interleaved in (False, True):
        constants = {
            "HEAD_DIM": HEAD_DIM, "PAIRS": HEAD_DIM // 2, "INTERLEAVED": interleaved, "BLOCK_PAIRS": HEAD_DIM // 2,
            "HEADS_AT_ONCE": models._WARPS,
        }  # fmt: skip
        arguments = (q, k, table, table, TOKENS, Q_HEADS, K_HEADS)
        stores = widths(models._rotate_heads_kernel, constants, arguments, models._WARPS)
        assert stores == {8 if interleaved else 4}, (interleaved, stores)


def widths(kernel, constants: dict, arguments: tuple, warps: int) -> set[int]:
    """Bytes of the stores of a kernel."""
    fixed = [constants[name] for name in kernel.arg_names[-len(constants) :]]
    launch = SimpleNamespace(kernel=kernel, fixed=fixed, options={"num_warps": warps})
    ptx = compiled(launch, arguments, 90).asm["ptx"]
    return {WIDTH[kind] for kind in re.findall(r"st\.global\.(\S+)", ptx)}


if __name__ == "__main__":
    main()
