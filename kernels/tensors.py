"""The tensors of each operation, as named tuples.

A tuple has the tensors that a call is given, those that it makes, and then the tables and positions. Both backends take
it. A Triton kernel gets one with the addresses, and a second one with the strides. Heads
are views ``[B, S, H, D]``, with any strides. Wherever a tuple has them,

- ``cos`` and ``sin`` are ``[P, W]``, ``[1, P, W]`` or ``[B, P, W]``, with a column for each pair, or for each feature
  with ``Rotation.full_width``. With ``Rotation.table_free`` both are the frequencies, int64 ``[R/2, 3]``
  (`angles_torch`).
- ``positions`` are ``[B, S]``, ``[B, S, axes]`` with ``Rotation.axes``, or ``[B]`` with ``Rotation.offsets``, in int32
  or int64. None means that positions count up from a first position (>= 0); the tables must then have their rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ropelab.kernels.float8 import FLOAT8_DTYPES

OF_ANY_STRIDE = {
    "positions", "slots", "q_scale", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "scales", "weights",
    "weights_out",
}  # fmt: skip
"""The tensors that have a stride for every axis. The last axis of all others is adjacent in a kernel."""


def addresses_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The addresses of tensors, and 0 for a tensor that a call lacks."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


class RotateTensors(NamedTuple):
    """q and k and their results. A result may be its input; a call without k has no ``k_out`` either."""

    q: Tensor
    k: Tensor | None
    q_out: Tensor
    k_out: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, xs: Sequence[Tensor], outs: Sequence[Tensor], cos, sin, positions=None) -> "RotateTensors":
        """The tuple for q, or for q and k."""
        k, k_out = (pair[1] if len(pair) > 1 else None for pair in (xs, outs))
        return cls(xs[0], k, outs[0], k_out, cos, sin, positions)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """q and its result and, with a k, k and its result."""
        pairs = (self.q, self.q_out), (self.k, self.k_out)
        return [(x, y) for x, y in pairs if x is not None and y is not None]

    @property
    def in_place(self) -> bool:
        """Whether the results are their inputs."""
        return all(x is y for x, y in self.pairs)

    @property
    def same_strides(self) -> bool:
        """Whether one offset serves an input and its result."""
        return all(x.stride()[:3] == y.stride()[:3] for x, y in self.pairs)


class NormTensors(NamedTuple):
    """q and k, the weights of their norms, ``[D]``, of one floating dtype, and the results."""

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    q_out: Tensor
    k_out: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class NormGradients(NamedTuple):
    """q and k, the gradients of their results, the weights, and the gradients of q and k and of the weights.

    ``q_dw`` and ``k_dw`` are contiguous, or None where nobody needs them. ``rows`` are their sums over parts of the
    tokens, which a kernel writes and another kernel adds.
    """

    q: Tensor
    k: Tensor
    q_grad: Tensor
    k_grad: Tensor
    q_weight: Tensor
    k_weight: Tensor
    q_dx: Tensor
    k_dx: Tensor
    q_dw: Tensor | None
    k_dw: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    rows: Tensor | None = None


class CacheTensors(NamedTuple):
    """The tensors of a rotation that also writes into a paged cache; the call writes the first nine.

    Attributes:
        k_cache, v_cache: ``[pages, page, Hk, D]`` and ``[pages, page, Hk, Dv]``. Slot ``s`` is row ``s % page`` of page
            ``s // page``.
        q_out: as ``q``, or of an 8-bit float; may be ``q``.
        k_out, v_out: as ``k`` and ``v``, or None; they may be ``k`` and ``v``.
        q_nope_out: as ``q_nope`` in the dtype of ``q_out``, or None.
        q_scale_out: ``[B, S, Hq, 1]``, or None: the scales of 8-bit floats in q that the call makes, float32.
        k_scale_cache, v_scale_cache: ``[pages, page, Hk]``, or None: the scales of the caches that the call
            makes, float32.
        q, k, v: ``[B, S, Hq, D]``, ``[B, S, Hk, D]`` and ``[B, S, Hk, Dv]``, of one dtype.
        q_nope: ``[B, S, Hq, N]``, features of q that do not rotate; or None.
        slots: ``[N]`` of int32 or int64 with ``N <= B S``: the slots of the first N tokens, sequence after sequence.
        q_weight, k_weight: ``[D]`` for a norm of every head, or ``[Hq D]`` and ``[Hk D]`` for a norm of every token; or
            both None.
        q_scale, k_scale, v_scale: given scales of 8-bit floats in q, the key cache and the value cache, float32
            ``[1]`` or ``[heads]``, or None.
    """

    k_cache: Tensor
    v_cache: Tensor
    q_out: Tensor
    k_out: Tensor | None
    v_out: Tensor | None
    q_nope_out: Tensor | None
    q_scale_out: Tensor | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    q_nope: Tensor | None
    slots: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    @property
    def norm_across_heads(self) -> bool:
        """Whether all heads of a token share a mean of the squares."""
        if self.q_weight is None or self.k_weight is None:
            return False
        return {len(self.q_weight), len(self.k_weight)} != {self.q.shape[-1]}

    @property
    def shares_scale(self) -> bool:
        """Whether k and v of a head share a scale, which ``k_scale_cache`` gets."""
        no_scale = self.v_scale is None and self.v_scale_cache is None
        return self.k_scale_cache is not None and no_scale and self.v_cache.dtype in FLOAT8_DTYPES


class CachedKeys(NamedTuple):
    """Keys in slots of a paged cache, which rotate in place; the call writes the first two.

    Attributes:
        k_cache: ``[pages, page, H, D]``, also of 8-bit floats.
        k_scale_cache: ``[pages, page, H]``, float32: the scales of rows of 8-bit floats, each of which becomes a
            new one; or None for scales that stay.
        slots: ``[N]`` of int32 or int64, which differ from each other.
        positions: ``[1, N]``: by how many positions each slot turns.
    """

    k_cache: Tensor
    k_scale_cache: Tensor | None
    slots: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor


class LatentTensors(NamedTuple):
    """The projection ``kv [B, S, H, N + V]`` and the shared ``k_pe [B, S, 1, R]``, and what is made of them.

    That is ``key [B, S, H, N + R]`` and ``value [B, S, H, V]``, or None for a value that is a view of kv.
    """

    kv: Tensor
    k_pe: Tensor
    key: Tensor
    value: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class LatentGradients(NamedTuple):
    """The gradients of key and value, and of kv and k_pe; see `LatentTensors`."""

    key_grad: Tensor
    value_grad: Tensor
    kv_grad: Tensor
    k_pe_grad: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class TailTensors(NamedTuple):
    """Heads ``[B, S, H, N + R]`` whose last R features rotate in place."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class QuantizeTensors(NamedTuple):
    """Heads that rotate and become 8-bit floats with a scale for each block of features; the call writes the first
    three.

    Attributes:
        out: float8_e4m3fn ``[B, S, G, (H / G) D]``: the heads of x, in G groups.
        scales: ``[S, G, N]``, the powers of two of all blocks of a token in float32, or four exponents in an int32; or
            None.
        weights_out: float32 ``[S, H]``, ``weights`` times the scales of the heads, or None.
        x: ``[B, S, H, D]`` with a batch of one.
        weights: ``[S, H]``, or None.
    """

    out: Tensor
    scales: Tensor | None
    weights_out: Tensor | None
    x: Tensor
    weights: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class BlockScaledCacheTensors(NamedTuple):
    """The tensors of a rotation that also writes a cache whose rows have scales; the call writes the first two.

    Attributes:
        kv_cache: uint8 ``[pages, bytes]``, see `block_scales.Page`.
        q_out: as ``q``; may be ``q``.
        q: ``[B, S, H, D]`` with a batch of one.
        kv: ``[S, D]``, of q's dtype.
        slots: ``[N]`` of int32 or int64 with ``N <= S``.
    """

    kv_cache: Tensor
    q_out: Tensor
    q: Tensor
    kv: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class ProjectionTensors(NamedTuple):
    """A product whose heads of q and k rotate: ``x weight^T + bias``. The call writes the caches and ``qkv``.

    Attributes:
        k_cache, v_cache: where k and v go, as in `CacheTensors`; or None.
        x: ``[B, S, K]`` or ``[S, K]``.
        weight, bias: ``[N, K]``, and ``[N]`` or None; of the dtype of x.
        slots: as in `CacheTensors`, beside the caches.
        q_weight, k_weight: the weights of the norms of q and of k ``[D]``, or None.
        qkv: ``[B, S, heads, D]``, of the dtype of x: the heads of q, of k, and as many of v, which do not rotate. With
            caches, the heads of q only.
    """

    k_cache: Tensor | None
    v_cache: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    slots: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
