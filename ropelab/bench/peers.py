"""Other implementations of the rotation behind one signature, and the check each must pass to be timed.

A peer's ``bind(workload, cos, sin)`` turns the float32 tables ``[S, rotary_dim/2]`` into the ones it wants
(outside what is timed: models build their tables once) and returns ``rotate(q, k) -> (q', k')``,
differentiable, on tensors in the workload's ``seq_format``; ``k`` and ``k'`` are None where the workload has
no k. Packages are called by their public functions where they have them, with the memory layout that each
expects, at no cost for transposed views.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch._functorch.config

import ropelab
from ropelab import layout as pairing
from ropelab import reference
from ropelab.bench import packages
from ropelab.bench.workloads import Buffers, Workload
from ropelab.seq_format import from_bshd, to_bshd

Pair = tuple[torch.Tensor, torch.Tensor | None]
Rotate = Callable[[torch.Tensor, torch.Tensor | None], Pair]
Bind = Callable[[Workload, torch.Tensor, torch.Tensor], Rotate]

BOTH = ("split_half", "interleaved")


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with.

    Attributes:
        tables: its convention for cos and sin, in words.
        layouts, directions: what it offers.
        package, version: where it comes from; None for code of this repository.
        narrow: it computes in the dtype of its tables, which is the dtype of q: every intermediate is
            rounded.
        own_tables: it builds its tables itself, from angles in float32 and from position 0 on.
        in_place: the result overwrites the input (or the cotangent).
        compiled: takes seconds to build for every new shape.
    """

    name: str
    bind: Bind
    tables: str
    layouts: tuple[str, ...] = BOTH
    directions: tuple[str, ...] = ("forward", "backward")
    package: str | None = None
    version: str | None = None
    narrow: bool = False
    own_tables: bool = False
    in_place: bool = False


# ------------------------------------------------------------------------------------------------- torch only


def _ropelab(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, inplace: bool = False) -> Rotate:
    options = {
        "cos": cos, "sin": sin, "inplace": inplace,
        "layout": workload.layout, "seq_format": workload.seq_format,
    }  # fmt: skip
    if workload.lengths:
        options["positions"] = ropelab.PackedSequences(workload.cu_seqlens(cos.device), workload.seq_len).positions

    def rotate(q, k):
        if inplace and torch.is_grad_enabled():  # leaves that require grad may not be overwritten
            q, k = q.detach(), None if k is None else k.detach()
        if k is None:
            return ropelab.apply_rope(q, **options), None
        return ropelab.apply_rope(q, k, **options)

    return rotate


def _formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """x cos + (x turned by a quarter) sin; the tables repeat each angle for both members of its pair."""
    rotary_dim = cos.shape[-1]
    rotary, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    if layout == "split_half":
        x0, x1 = rotary.chunk(2, dim=-1)
        turned = torch.cat((-x1, x0), dim=-1)
    else:
        turned = torch.stack((-rotary[..., 1::2], rotary[..., 0::2]), dim=-1).flatten(-2)
    rotary = rotary * cos + turned * sin
    return torch.cat((rotary, tail), dim=-1) if tail.shape[-1] else rotary


def _hugging_face(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, compiled: bool = False) -> Rotate:
    wide_cos, wide_sin = (pairing.join(t, t, workload.layout).to(workload.dtype) for t in (cos, sin))
    fmt, layout = workload.seq_format, workload.layout

    def one(x):
        if x is None:
            return None
        return _from_bhsd(_formula(_to_bhsd(x, fmt), wide_cos, wide_sin, layout), fmt)

    def rotate(q, k):
        return one(q), one(k)

    if not compiled:
        return rotate
    # A new shape is a new compilation; without the reset, the limit on recompilations ends in an error.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # its backward would refuse to run twice on one forward
    return torch.compile(rotate, dynamic=False, fullgraph=True)


def _complex(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    turns = torch.complex(cos.float(), sin.float()).unsqueeze(1)

    def one(x):
        if x is None:
            return None
        x = to_bshd(x, workload.seq_format)
        rotary, tail = x[..., : workload.rotary_dim], x[..., workload.rotary_dim :]
        z = torch.view_as_complex(rotary.float().unflatten(-1, (-1, 2)))
        y = torch.view_as_real(z * turns).flatten(-2).to(x.dtype)
        return from_bshd(torch.cat((y, tail), dim=-1) if tail.shape[-1] else y, workload.seq_format)

    return lambda q, k: (one(q), one(k))


# --------------------------------------------------------------------------------------------------- packages


def _to_bhsd(x: torch.Tensor | None, seq_format: str) -> torch.Tensor | None:
    """View as ``[B, H, S, D]``; ``_from_bhsd`` leads back."""
    if x is None or seq_format == "bhsd":
        return x
    return to_bshd(x, seq_format).transpose(1, 2)


def _from_bhsd(x: torch.Tensor | None, seq_format: str) -> torch.Tensor | None:
    if x is None or seq_format == "bhsd":
        return x
    return from_bshd(x.transpose(1, 2), seq_format)


def _require_full_width(workload: Workload, package: str) -> None:
    if workload.rotary_dim != workload.head_dim:
        raise NotImplementedError(f"{package}: rotates whole heads only")


def _torchembed(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """split_half: the head-major kernel, once for q and once for k; interleaved: the [B, S, H, D] kernel."""
    _require_full_width(workload, "torchembed")
    module = packages.load_file("torchembed", version, "torchembed/_triton.py")
    fmt = workload.seq_format
    if workload.layout == "interleaved":
        one = module.fused_rope_bshd_apply

        def rotate_pairs(q, k):
            return tuple(None if x is None else from_bshd(one(to_bshd(x, fmt), cos, sin), fmt) for x in (q, k))

        return rotate_pairs
    wide_cos, wide_sin = (pairing.join(t, t, "split_half") for t in (cos, sin))

    def rotate(q, k):
        q, k = _to_bhsd(q, fmt), _to_bhsd(k, fmt)
        if k is None:
            # The public function wants a k; its autograd function is the kernel for one tensor.
            return _from_bhsd(module._FusedRoPE.apply(q, wide_cos, wide_sin), fmt), None
        q, k = module.fused_rope_forward(q, k, wide_cos, wide_sin)
        return _from_bhsd(q, fmt), _from_bhsd(k, fmt)

    return rotate


def _torchembed_api(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """The module. Without a k, q takes its place too and the second result is dropped, as DeepSpeed does."""
    _require_full_width(workload, "torchembed")
    if workload.first_position:
        raise NotImplementedError("torchembed's module starts at position 0")
    names = ("torchembed", version, "torchembed", "._triton", ".positional")
    with packages.imported(*names) as package:
        module = package.RotaryEmbedding(
            workload.rotary_dim, max_seq_len=workload.seq_len, use_fused=True, device=cos.device
        )
    fmt = workload.seq_format

    def rotate(q, k):
        # It imports its kernel when called, and falls back to its slow path in silence if it cannot.
        with packages.imported(*names):
            new_q, new_k = module(_to_bhsd(q, fmt), _to_bhsd(q if k is None else k, fmt))
        return _from_bhsd(new_q, fmt), None if k is None else _from_bhsd(new_k, fmt)

    return rotate


def _liger(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    module = packages.load_file("liger-kernel", version, "liger_kernel/ops/rope.py")
    wide_cos, wide_sin = (pairing.join(t, t, "split_half").unsqueeze(0).to(workload.dtype) for t in (cos, sin))
    fmt = workload.seq_format

    def rotate(q, k):
        if k is None:
            raise NotImplementedError("liger-kernel rotates q and k together")
        q, k = module.LigerRopeFunction.apply(_to_bhsd(q, fmt), _to_bhsd(k, fmt), wide_cos, wide_sin)
        return _from_bhsd(q, fmt), _from_bhsd(k, fmt)

    return rotate


class _Rotated(torch.autograd.Function):
    """``rotate(x, inverse)`` where only that is to be had, differentiable: its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, rotate):
        ctx.rotate = rotate
        return rotate(x, False)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rotate(grad, True), None


def differentiable(rotate: Callable[[torch.Tensor, bool], torch.Tensor]) -> Rotate:
    """From ``rotate(x, inverse)`` of one tensor."""

    def one(x):
        return None if x is None else _Rotated.apply(x, rotate)

    return lambda q, k: (one(q), one(k))


def _flash_attention(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Its own differentiable function imports the CUDA extension."""
    apply_rotary = packages.load_file("flash-attn", version, "flash_attn/ops/triton/rotary.py").apply_rotary
    options = {"interleaved": workload.layout == "interleaved"}
    if workload.lengths:
        options |= {"cu_seqlens": workload.cu_seqlens(cos.device), "max_seqlen": max(workload.lengths)}
        return differentiable(lambda x, inverse: apply_rotary(x, cos, sin, conjugate=inverse, **options))
    fmt = workload.seq_format

    def rotate(x, inverse):
        return from_bshd(apply_rotary(to_bshd(x, fmt), cos, sin, conjugate=inverse, **options), fmt)

    return differentiable(rotate)


# -------------------------------------------------------------------------------------------------- the lists

_FP32 = "float32"
_OF_Q = "rounded to the dtype of q"

PEERS: tuple[Peer, ...] = (
    Peer("ropelab", _ropelab, _FP32),
    Peer("ropelab in place", partial(_ropelab, inplace=True), _FP32, directions=("forward",), in_place=True),
    Peer("hf_eager", _hugging_face, _OF_Q, narrow=True),
    Peer("hf_compiled", partial(_hugging_face, compiled=True), _OF_Q, narrow=True),
    Peer("complex", _complex, "float32, as complex64", layouts=("interleaved",)),
    Peer("torchembed 0.3.0", partial(_torchembed, version="0.3.0"), _FP32, layouts=("split_half",),
         package="torchembed", version="0.3.0"),
    Peer("torchembed 0.3.2", partial(_torchembed, version="0.3.2"), _FP32,
         package="torchembed", version="0.3.2"),
    Peer("liger", _liger, _OF_Q, layouts=("split_half",), package="liger-kernel", narrow=True, in_place=True),
    Peer("flash_attn", _flash_attention, _FP32, package="flash-attn"),
)  # fmt: skip
"""Compared in the dense benchmark."""

TORCHEMBED_API = Peer(
    "torchembed API", partial(_torchembed_api, version="0.3.2"), "its own, float32 angles",
    layouts=("split_half",),
    package="torchembed", version="0.3.2", own_tables=True,
)  # fmt: skip


def available(peers: tuple[Peer, ...] = PEERS) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run here, each bound to a version, and name -> reason for the others."""
    found, missing = [], {}
    for peer in peers:
        try:
            found.append(_with_version(peer))
        except packages.NotInstalled as error:
            missing[peer.name] = f"not run: {error}"
    return found, missing


def _with_version(peer: Peer) -> Peer:
    if peer.package is None:
        return peer
    version, _ = packages.locate(peer.package, peer.version)
    bind = peer.bind if peer.version else partial(peer.bind, version=version)
    return replace(peer, bind=bind, version=version)


# -------------------------------------------------------------------------------------------------- the check


@dataclass(frozen=True)
class Check:
    """Outcome of comparing one result with the reference.

    Attributes:
        relative_error: ``|y - y_ref| / |y_ref|`` over all elements.
        worst: the largest error of an element over its bound; right if at most 1.
    """

    what: str
    relative_error: float
    worst: float

    @property
    def status(self) -> str:
        """``"ok"`` or ``"wrong: ..."``; NaN is wrong."""
        if self.worst <= 1:
            return "ok"
        size = f"relative error {self.relative_error:.3g}, {self.worst:.3g} times its bound"
        return f"wrong: {self.what} has {size}"


def error_bound(x: torch.Tensor, workload: Workload, peer: Peer) -> torch.Tensor:
    """Largest error, elementwise and in float64, of ``x`` rotated with rounding where this peer rounds.

    For a pair, with c and s at most 1 in magnitude, unit roundoffs ``t`` of the tables, ``u`` of the
    arithmetic and ``o`` of the result, and an error ``a`` (rad) of the angles::

        |error| <= (t + a + 2 u + o) (|x0| + |x1|) (1 + higher orders)

    u: two products and their sum take two roundings each; float32 and wider, or the dtype of q for a peer
        whose tables are narrow. a: float32 angles ``position * inv_freq`` err by a few float32 roundings of
        the position. Features that do not rotate must come back unchanged.
    """
    wide = torch.promote_types(workload.dtype, torch.float32)
    narrow = workload.dtype if peer.narrow else wide
    last = workload.first_position + workload.seq_len - 1
    # inv_freq takes a division and a power (4 roundings together), the product with the position one more.
    angle = 5 * last * _roundoff(torch.float32) if peer.own_tables else 0.0
    factor = _roundoff(narrow) + angle + 2 * _roundoff(narrow) + _roundoff(workload.dtype)
    x = to_bshd(x.detach().abs().double(), workload.seq_format)
    bound = torch.zeros_like(x)
    r = workload.rotary_dim
    x0, x1 = pairing.pairs(x[..., :r], workload.layout)
    for half in pairing.pairs(bound[..., :r], workload.layout):
        # 1.05 covers the products of two roundoffs; the last term, results that underflow.
        half.copy_(1.05 * factor * (x0 + x1) + 4 * torch.finfo(workload.dtype).tiny)
    return from_bshd(bound, workload.seq_format)


def check(
    peer: Peer, rotate: Rotate, workload: Workload, buffers: Buffers, exact: Sequence[torch.Tensor] | None = None
) -> Check:
    """Compare what the workload's direction computes (result or gradient) with the float64 definition.

    The cotangent is random. Inputs are copied first, strides included: a peer may overwrite them.

    Args:
        rotate: what ``peer.bind`` returned for this workload in either direction.
        exact: cos and sin in float64, ``[S, rotary_dim/2]``, where they are not those of the workload's positions.

    Raises:
        TypeError: a result of another shape or dtype than the input's; and whatever the peer itself raises.
    """
    fresh = [_same_strides(x).copy_(x.detach()).requires_grad_() for x in buffers.inputs]
    results = _outputs(rotate, *fresh)
    sources, what, backward = buffers.inputs, "result", workload.direction == "backward"
    if backward:
        sources, what = buffers.cotangents, "gradient"
        results = torch.autograd.grad(results, fresh, [g.clone() for g in sources])
    squared_error = squared_norm = worst = 0.0
    for y, x in zip(results, sources, strict=True):
        if y.shape != x.shape or y.dtype != x.dtype:
            found, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (y, x))
            raise TypeError(f"{peer.name}: expected a {what} of {expected}, got {found}")
        cos, sin = exact or _exact_tables(workload, x.device)
        truth = reference.rotate(
            x.detach(), cos, sin, layout=workload.layout, seq_format=workload.seq_format,
            positions=workload.positions(x.device), inverse=backward,
        )  # fmt: skip
        error = (y.detach().double() - truth).abs()
        # 0/0 is a feature that does not rotate and came back unchanged.
        excess = torch.where(error == 0, 0.0, error / error_bound(x, workload, peer)).max().item()
        worst = max(worst, float("inf") if math.isnan(excess) else excess)
        squared_error += error.square().sum().item()
        squared_norm += truth.square().sum().item()
    return Check(what, (squared_error / squared_norm) ** 0.5, worst)


def calls(rotate: Rotate, workload: Workload, sets: list[Buffers]) -> list[Callable[[], object]]:
    """One call per set of buffers of what the workload times; for a backward, the forward is run here."""
    if workload.direction == "forward":
        return [partial(_outputs, rotate, *b.inputs) for b in sets]
    return [
        partial(torch.autograd.grad, _outputs(rotate, *b.inputs), b.inputs, b.cotangents, retain_graph=True)
        for b in sets
    ]


def _outputs(rotate: Rotate, q: torch.Tensor, k: torch.Tensor | None = None) -> list[torch.Tensor]:
    return [y for y in rotate(q, k) if y is not None]


def _exact_tables(workload: Workload, device) -> list[torch.Tensor]:
    last = workload.first_position + workload.seq_len
    tables = ropelab.rotary_table(last, workload.rotary_dim, dtype=torch.float64, device=device)
    return [t[workload.first_position :] for t in tables]


def _same_strides(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of ``x`` that lies as ``x`` does; ``clone`` would close the gaps of a view."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
