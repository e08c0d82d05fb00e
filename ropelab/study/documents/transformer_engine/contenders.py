"""Run the contenders of the records: the two grids as published, and as launch strategies of one kernel of ours.

*legacy*: a block for every row of ``freqs`` and every sequence. *linear*: a block for every token, which searches for
its sequence. Both launch the same rotation of a token, so the study compares the grids alone.

This kernel is a model of TransformerEngine's kernel (``ropelab.bench.varlen_models``), and on purpose not the kernel of
ropelab's functions. A strategy is how a block finds its token and its position. The kernel of ropelab finds neither.
Its positions come from one small launch that all layers share, and its program takes a tile of tokens and heads. A
block for each row of ``freqs`` cannot take a tile. With these grids the kernel of ropelab would show the loss of its
tiles, not the cost of the grids.

``measure.parity`` compares the results of the models with ropelab's results. It holds both to the bound of the
definition in every case, and counts the elements with the same bits. Not all elements can have the same bits, because
ropelab multiplies with cosines that were computed once, and a program of the models computes its own cosines.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import torch

from ropelab.bench import peers, varlen_models
from ropelab.bench.peers import differentiable, te_library, te_source, transformer_engine
from ropelab.study.documents.transformer_engine.dispatch import LEGACY, LINEAR, choose
from ropelab.study.documents.transformer_engine.grids import ALL, CODE, MODELS, PACKAGES, Grids

STRATEGIES: dict[str, Callable[..., torch.Tensor]] = {
    LEGACY: varlen_models.legacy_grid,
    LINEAR: varlen_models.token_linear,
}


def rotate_thd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    strategy: str | None = None,
    version: str = "first",
    interleaved: bool = False,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate packed tokens as TransformerEngine's fused path does, by one strategy in both directions.

    Args:
        t: ``[T, h, d]``, this rank's tokens; any strides.
        freqs: float32 ``[s2, 1, 1, d]`` angles; its length is a side of the legacy grid.
        cu_seqlens: int32 ``[n + 1]``, not sharded.
        strategy: ``"legacy"`` or ``"linear"``; by default the strategy that ``choose`` gives for ``version``.

    Returns:
        A new tensor, differentiable in ``t``.
    """
    angles = freqs[:, 0, 0].contiguous()
    if strategy is None:
        strategy = choose(len(cu_seqlens) - 1, len(angles), len(t), cp_size, version=version)
    where = {"start_positions": start_positions, "cp_size": cp_size, "cp_rank": cp_rank}
    kernel = partial(STRATEGIES[strategy], angles=angles, cu_seqlens=cu_seqlens, interleaved=interleaved, **where)
    return differentiable(lambda x, inverse: kernel(x, inverse=inverse))(t, None)[0]


Rotate = Callable[..., torch.Tensor]


def rotation(name: str) -> Rotate:
    """The rotation of packed tokens by a contender: a function of ``t``, and of the keywords of `rotate_thd`.

    The keywords are freqs, cu_seqlens, interleaved, start_positions, cp_size and cp_rank.

    Raises:
        NotInstalled: the package, the library of the file, or a GPU is missing.
        ValueError: no contender has this name.
    """
    if name in MODELS.names:
        return partial(rotate_thd, strategy=LINEAR if name == MODELS.new else LEGACY)
    context = nullcontext
    if name in CODE.names:
        library = te_source.library()
        context = partial(te_source.forced, name == CODE.new)
    elif name in PACKAGES.names:
        library = te_library.load(te_library.find(peers.BY_NAME[name].version))
    else:
        raise ValueError(f"name: expected one of {[pair.names for pair in ALL]}, got {name!r}")
    return partial(transformer_engine.apply_rotary_pos_emb, library, tensor_format="thd", context=context)


@cache
def runs(pair: Grids) -> bool:
    """Whether both contenders of a pair can run here."""
    try:
        for name in pair.names:
            rotation(name)
    except RuntimeError:  # `Unavailable` is one
        return False
    return True
