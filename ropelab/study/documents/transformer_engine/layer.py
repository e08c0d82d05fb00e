"""A transformer layer on packed sequences, of table A's size, to measure the rotation's share of its time.

A plain pre-norm layer in torch has two residual halves. The first half is LayerNorm, one projection to q, k and v, the
rotation of q and k, causal attention within each sequence (``torch.nn.attention.varlen``) and the output projection.
The second half is LayerNorm and two projections with GELU between. A layer of TransformerEngine differs: it fuses the
norms into its GEMMs and runs other GEMMs.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F

from ropelab import PackedSequences, apply_rope
from ropelab.bench import timing
from ropelab.bench.cells import progress
from ropelab.bench.operation import tidy
from ropelab.study.documents.transformer_engine import packings
from ropelab.study.documents.transformer_engine.contenders import rotation, runs
from ropelab.study.documents.transformer_engine.grids import ALONE, CODE, LAYER, MODELS, PACKAGES, WITHOUT
from ropelab.study.documents.transformer_engine.measure import Truth, require_gpu, why_not, worst
from ropelab.study.documents.transformer_engine.packings import Packing

N_SEQS = (128, 512, 1024, 2401)

RotatePair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Scale:
    tokens: int = packings.TOKENS
    hidden: int = 1536
    heads: int = 12
    ffn: int = 6144
    n_seqs: tuple[int, ...] = N_SEQS
    rounds: int = 3

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SMOKE = Scale(tokens=1024, hidden=256, heads=2, ffn=512, n_seqs=(8,), rounds=2)


def layer(*, smoke: bool = False) -> pd.DataFrame:
    """Times of forward and backward of the layer, and of the rotation of its q and k alone.

    The layer runs with either grid, TransformerEngine, ropelab or no rotation. The sequences are balanced,
    ``freqs_len`` is the number of all tokens, the dtype is bf16, and the cotangent of the layer's result is random.

    Columns: what (the layer, or the rotation of its q and k alone), n_seqs, longest, tokens, freqs_len, contender,
        status, median_us, q20_us, q80_us, samples.
    """
    require_gpu()
    return measure_layer(SMOKE if smoke else Scale(), "cuda")


def measure_layer(scale: Scale, device: str, dtype=torch.bfloat16) -> pd.DataFrame:
    """The table of ``layer`` for these sizes."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    weights = Weights.drawn(scale, draw)
    x, gradient = draw(scale.tokens, scale.hidden).requires_grad_(), draw(scale.tokens, scale.hidden)
    truth = Truth(scale.tokens, scale.head_dim, device)
    frames = []
    for n in progress(scale.n_seqs, lambda n: f"{n} sequences"):
        packing = packings.balanced(n, scale.tokens)
        rotations, status = contenders(packing, truth, device)
        attend = partial(attention, cu_seqlens=packing.cu_seqlens(device), longest=packing.longest)
        status |= {name: _status(rotate, packing, truth, scale, draw) for name, rotate in rotations.items()}
        right = {name: rotate for name, rotate in rotations.items() if status[name] == "ok"}
        whole = {
            name: partial(_layer_calls, weights, x, gradient, rotate, attend, scale)
            for name, rotate in (right | {WITHOUT: lambda q, k: (q, k)}).items()
        }
        pair = [draw(scale.tokens, scale.heads, scale.head_dim).requires_grad_() for _ in range(2)]
        cotangents = [draw(scale.tokens, scale.heads, scale.head_dim) for _ in range(2)]
        alone = {name: partial(_alone_calls, pair, cotangents, rotate) for name, rotate in right.items()}
        for what, timed in ((LAYER, whole), (ALONE, alone)):
            frame = timing.gpu_times(timed, rounds=scale.rounds, graph_ms=1.0)
            columns = {"what": what, "n_seqs": n, "longest": packing.longest, "tokens": scale.tokens}
            lost = {name: outcome for name, outcome in status.items() if outcome != "ok"}
            frames.append(tidy(frame, columns | {"freqs_len": scale.tokens}, lost))
            if device == "cuda":
                torch.cuda.empty_cache()  # frees the memory of the graphs
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class Weights:
    """The weights of a layer, in the order of their use; all require grad."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, ...]

    @classmethod
    def drawn(cls, scale: Scale, draw: Callable[..., torch.Tensor]) -> "Weights":
        h, ffn = scale.hidden, scale.ffn
        shapes = ((3 * h, h), (h, h), (ffn, h), (h, ffn))
        matrices = [(draw(shape) * shape[1] ** -0.5).requires_grad_() for shape in shapes]
        norms = tuple((draw(h) * 0.02 + 1).requires_grad_() for _ in range(2))
        return cls(*matrices, norms)

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.qkv, self.out, self.up, self.down, *self.norms)


def forward(
    weights: Weights, x: torch.Tensor, rotate: RotatePair, attend: Callable[..., torch.Tensor], scale: Scale
) -> torch.Tensor:
    """The layer, ``[T, hidden]`` -> ``[T, hidden]``. q, k and v are views of the result of one projection."""
    norm = partial(F.layer_norm, normalized_shape=(scale.hidden,))
    qkv = F.linear(norm(x, weight=weights.norms[0]), weights.qkv)
    q, k, v = qkv.view(scale.tokens, 3, scale.heads, scale.head_dim).unbind(1)
    x = x + F.linear(attend(*rotate(q, k), v).reshape(scale.tokens, scale.hidden), weights.out)
    return x + F.linear(F.gelu(F.linear(norm(x, weight=weights.norms[1]), weights.up)), weights.down)


def attention(q, k, v, *, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Causal attention within each sequence; its time grows with the sum of the squared lengths, not with T squared."""
    from torch.nn.attention.varlen import varlen_attn

    # torch up to 2.10 takes a flag for causal attention, and later versions take a window.
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **causal)


def contenders(packing: Packing, truth: Truth, device: str) -> tuple[dict[str, RotatePair], dict[str, str]]:
    """The rotations of q and k by contender, and contender -> status for the contenders that cannot run.

    The grids take q and k in a launch each, as TransformerEngine does; ropelab takes both at once. TransformerEngine
    2.18 and our models stand in for the pull request's file where it cannot be compiled.
    """
    cu_seqlens = packing.cu_seqlens(device)
    positions = PackedSequences(cu_seqlens, packing.tokens).positions
    cos, sin = truth.cos.float(), truth.sin.float()

    def by_grid(name: str) -> RotatePair:
        one = partial(rotation(name), freqs=truth.freqs, cu_seqlens=cu_seqlens)
        return lambda q, k: (one(q), one(k))

    found, missing = {}, {}
    for name in (*CODE.names, PACKAGES.new, *(() if runs(CODE) else (PACKAGES.old, *MODELS.names))):
        try:
            found[name] = by_grid(name)
        except Exception as error:  # a contender that cannot run is a result too
            missing[name] = why_not(error)
    ours = partial(apply_rope, cos=cos, sin=sin, seq_format="thd", positions=positions)
    return found | {"ropelab": ours}, missing


def _status(rotate: RotatePair, packing: Packing, truth: Truth, scale: Scale, draw) -> str:
    """``"ok"`` if q, k and their gradients are right for views of a qkv buffer; unchecked with the clock stopped."""
    if timing.is_stopped():
        return "ok"
    try:
        qkv = draw(scale.tokens, 3, scale.heads, scale.head_dim).requires_grad_()
        pair = qkv.unbind(1)[:2]
        results = rotate(*pair)
        cotangents = [draw(y.shape) for y in results]
        gradients = torch.autograd.grad(results, pair, cotangents)
        positions = packing.positions().to(qkv.device)
        error = max(
            worst(y, truth.of(x, positions, inverse=inverse))
            for inverse, ys, xs in ((False, results, pair), (True, gradients, cotangents))
            for y, x in zip(ys, xs, strict=True)
        )
        return "ok" if error <= 1 else f"wrong: {error:.3g} times its bound"
    except Exception as error:  # a contender that cannot run is a result too
        return why_not(error)


def _layer_calls(weights: Weights, x, gradient, rotate: RotatePair, attend, scale: Scale) -> list[Callable]:
    leaves = (x, *weights.all())
    return [lambda: torch.autograd.grad(forward(weights, x, rotate, attend, scale), leaves, gradient)]


def _alone_calls(pair, cotangents, rotate: RotatePair) -> list[Callable]:
    return [lambda: torch.autograd.grad(rotate(*pair), pair, cotangents)]
