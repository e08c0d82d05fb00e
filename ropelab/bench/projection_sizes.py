"""Time both paths of `qkv_rope` for products that nobody chose, to find the faster path of a size by the choice.

The sizes are drawn. Each has the product of PyTorch alone, with a pass behind it, and the product that rotates.
"""

import math
import random
from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import torch

from ropelab.bench import timing
from ropelab.bench.compare import progress, tidy
from ropelab.bench.projection import ALONE, KERNEL, OURS, Projection, Tensors, on_path
from ropelab.layout.pairing import LAYOUTS

DRAWS = 1, 2
"""The seeds: the choice was made for the sizes of the first, and the others check it."""
COUNT = 200
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
    """Time the paths.

    Columns: draw, tokens, inputs, outputs, q_heads, k_heads, head_dim, block, layout, counted; contender, status,
        median_us, q20_us, q80_us, samples.
    """
    cases = [(seed, case) for seed in DRAWS for case in drawn(seed, 1 if smoke else COUNT)]
    described = progress(cases, lambda pair: f"{pair[1].tokens} x {pair[1].inputs} x {pair[1].outputs}")
    with torch.no_grad():
        frames = [_compare(seed, case, device, 3 if smoke else 15) for seed, case in described]
    return pd.concat(frames, ignore_index=True)


def _compare(seed: int, case: Projection, device: torch.device | str, rounds: int) -> pd.DataFrame:
    tensors, status = Tensors(case, device, sets=case.sets(timing.cache_bytes())), {}
    runs = {ALONE: torch.nn.functional.linear, OURS: on_path(tensors, "pass"), KERNEL: on_path(tensors, "product")}
    small = Tensors(case.checked, device, seed=1)
    for name, path in ((OURS, "pass"), (KERNEL, "product")):
        try:
            outcome = small.check(on_path(small, path))
        except Exception as error:  # the status records the error
            outcome = timing.failure(error)
        if outcome != "ok":
            status[name] = outcome
    timed: dict[str, Callable] = {
        name: partial(_calls, run, tensors.sets) for name, run in runs.items() if name not in status
    }
    frame = timing.gpu_times(timed, rounds=rounds)
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return tidy(frame, {"draw": seed, **case.columns, "layout": case.layout, "counted": case.counted}, status)


def _calls(run: Callable, sets: Iterable[tuple[torch.Tensor, ...]]) -> list[Callable[[], object]]:
    return [partial(run, *tensors) for tensors in sets]
