"""Time both paths of `qkv_rope` for products that nobody chose, to find the faster path of a size by the choice.

The sizes are drawn. Each has the product of PyTorch alone, with a pass behind it, and the product that rotates, in CUDA
graphs; and `qkv_rope` beside a linear layer and the pass, in eager calls.
"""

import itertools
import math
import random
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch

from ropelab import apply_qk_norm_rope, apply_rope, qkv_rope
from ropelab.bench import cells, timing
from ropelab.bench.operation import Contender, checked, divided, tidy
from ropelab.bench.projection import KERNEL, OURS, PRODUCT, Projected, Projection, Tensors, alone, paths
from ropelab.call.projection import Heads
from ropelab.layout.pairing import LAYOUTS

DRAWS = 1, 2
"""The seeds: the choice was made for the sizes of the first, and the others check it."""
COUNT = 200
EAGER, EAGER_STEPS = "qkv_rope, eager", "F.linear and the pass, eager"
"""Contenders whose time is that of eager calls, of the host or of the GPU, whichever is slower."""
_BATCH_US, _BATCH = 2000, (2, 20)
"""The least time of a sample of eager calls, and the least and the largest number of its calls."""
TOKENS, INPUTS, HEADS, HEAD_DIMS = (1, 32768), (512, 8192), (1, 96), (64, 80, 96, 128)


def drawn(seed: int, count: int = COUNT) -> list[Projection]:
    """Products: tokens, inputs and heads of q by the logarithm, and heads of k that divide those of q."""
    generator = random.Random(seed)

    def between(least: int, most: int, multiple: int = 1) -> int:
        drawn = math.exp(generator.uniform(math.log(least), math.log(most)))
        return max(least, round(drawn / multiple) * multiple)

    def one() -> Projection:
        q_heads = between(*HEADS)
        k_heads = generator.choice([heads for heads in range(1, q_heads + 1) if q_heads % heads == 0])
        return Projection(
            between(*TOKENS), between(*INPUTS, multiple=64), q_heads, k_heads, generator.choice(HEAD_DIMS),
            block=generator.choice(["rotation", "norm"]), layout=generator.choice(LAYOUTS),
            counted=generator.random() < 0.5,
        )  # fmt: skip

    return [one() for _ in range(count)]


def sizes(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the paths; `EAGER` and `EAGER_STEPS` in eager calls, and the others on the GPU.

    Columns: draw, tokens, inputs, outputs, q_heads, k_heads, head_dim, block, layout, counted; contender, status,
        median_us, q20_us, q80_us, samples.
    """
    cases = [(seed, case) for seed in DRAWS for case in drawn(seed, 1 if smoke else COUNT)]
    with torch.no_grad():
        return cells.table(
            cases, lambda pair: _compare(*pair, device, 3 if smoke else 15),
            lambda pair: f"{pair[1].tokens} x {pair[1].inputs} x {pair[1].outputs}",
        )  # fmt: skip


def _compare(seed: int, case: Projection, device: torch.device | str, rounds: int) -> pd.DataFrame:
    projected = Projected(case, paths)
    sets = projected.sets(device)
    tensors, found = sets[0][0], projected.contenders(sets, device)
    right, wrong = divided(found, checked(projected, sets, found, device))
    if KERNEL in right:
        right[PRODUCT] = Contender(partial(alone, tensors))
    frame = timing.gpu_times({name: projected.prepared(one, sets, "") for name, one in right.items()}, rounds=rounds)
    torch.cuda.empty_cache()  # the graphs have memory of their own
    pass_us = frame.loc[frame.contender == OURS, "median_us"].max()
    batch = round(min(max(_BATCH_US / pass_us, _BATCH[0]), _BATCH[1])) if pass_us > 0 else _BATCH[0]
    eager = {
        EAGER: partial(_in_turn, partial(qkv_rope, **tensors.options()), tensors),
        EAGER_STEPS: partial(_in_turn, _steps(tensors), tensors),
    }
    frame = pd.concat([frame, timing.host_times(eager, rounds=rounds, batch=batch, both=True)])
    return tidy(frame, {"draw": seed, **case.columns, "layout": case.layout, "counted": case.counted}, wrong)


def _steps(tensors: Tensors) -> Callable:
    """A linear layer of PyTorch, and the pass over q and k."""
    case = tensors.case
    heads = Heads(case.q_heads, case.k_heads, case.head_dim)
    options = {name: x for name, x in tensors.options().items() if name not in ("q_heads", "k_heads", *tensors.norms)}
    norms = tensors.norms.values()

    def run(x, weight):
        q, k, v = heads.split(torch.nn.functional.linear(x, weight))
        if norms:
            return *apply_qk_norm_rope(q, k, *norms, **options), v
        return *apply_rope(q, k, inplace=True, **options), v

    return run


def _in_turn(run: Callable, tensors: Tensors) -> Callable[[], object]:
    sets = itertools.cycle(tensors.sets)
    return lambda: run(*next(sets))
