"""This file defines two operations of an inference engine: a rotation, and a write into the paged cache of attention.

A slot is the place of a token in a cache. Page ``s // PAGE`` has the slot ``s`` at the place ``s % PAGE``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import ropelab
from ropelab import reference
from ropelab.bench.peers.torch_library import Operators
from ropelab.bench.workloads import Workload

PAGE = 16
"""Tokens in a page, as by default in vLLM."""
POSITIONS = 8192
"""Rows of the tables."""
EPS = 1e-6

Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], Tensors]
"""A function of the tensors of a call that returns the rotated tensors. It writes into the caches of the call, and may
overwrite q and k."""


@dataclass(frozen=True)
class Operation(ABC):
    """A rotation with a write into a cache, for ``tokens`` tokens.

    Every call has int64 ``positions`` and ``slots`` ``[tokens]``, and caches ``[pages, PAGE, ...]``.
    """

    tokens: int

    name: ClassVar[str]
    layout: ClassVar[str]
    heads: ClassVar[tuple[int, int]]
    """Heads of q, and heads that the operation reads beside q. An entry of the cache counts as heads of k."""
    head_dim: ClassVar[int]
    roundings: ClassVar[float]
    """The error of a head that is allowed, in unit roundoffs: see `ropelab.bench.agreement`."""
    cached: ClassVar[tuple[str, ...]]
    """The names of the caches."""

    @property
    def work(self) -> Workload:
        """The tensors to read, as a workload: it knows the bytes, and how many sets of tensors exceed a cache."""
        heads = (*self.heads, self.head_dim, self.head_dim)
        return Workload(self.name, 1, self.tokens, *heads, layout=self.layout)

    def tables(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Cosines and sines ``[POSITIONS, R/2]``."""
        return list(ropelab.rotary_table(POSITIONS, self.head_dim, dtype=dtype, device=device))

    @abstractmethod
    def caches(self, pages: int, draw: Callable[..., torch.Tensor]) -> Tensors:
        """Caches with random contents; ``draw(*shape)`` draws in the dtype of the workload."""

    @abstractmethod
    def inputs(self, draw: Callable[..., torch.Tensor]) -> Tensors:
        """The tensors of a call but positions, slots and caches."""

    @abstractmethod
    def to_copy(self, call: Tensors) -> Sequence[torch.Tensor]:
        """The tensors to read. A copy of them writes as many bytes as the operation must write."""

    @abstractmethod
    def right(self, call: Tensors) -> Tensors:
        """What a run returns and what `stored` returns, as it should be: see `ropelab.bench.agreement`."""

    @abstractmethod
    def stored(self, cache: str, rows: torch.Tensor) -> Tensors:
        """The tensors that a run stored, by the names that `right` has; ``rows`` are the slots of the tokens."""

    @abstractmethod
    def ours(self, device: torch.device | str) -> Run:
        """The launches that ropelab needs: a rotation, and ``index_copy_`` for every tensor to store."""

    @abstractmethod
    def vllm(self, operators: Operators, device: torch.device | str) -> Run:
        """The fused operator of vLLM, called as vLLM's Python function calls the operator."""


@dataclass(frozen=True)
class NormAndCache(Operation):
    """QK norm and rotation of halves, and k and v into caches ``[pages, PAGE, Hk, D]``. The input is a packed qkv."""

    name = "QK norm, rotation, cache"
    layout = "split_half"
    heads = (32, 16)
    head_dim = 128
    roundings = 12
    """As in `ropelab.bench.qk_norm.status`."""
    cached = ("k cache", "v cache")

    q_heads: ClassVar[int] = 32
    k_heads: ClassVar[int] = 8

    def caches(self, pages, draw):
        return {name: draw(pages, PAGE, self.k_heads, self.head_dim) for name in self.cached}

    def inputs(self, draw):
        heads = self.q_heads + 2 * self.k_heads
        weights = {name: draw(self.head_dim) for name in ("q weight", "k weight")}
        return {"qkv": draw(self.tokens, heads * self.head_dim)} | weights

    def to_copy(self, call):
        return (call["qkv"],)

    def _parts(self, call: Tensors) -> tuple[torch.Tensor, ...]:
        return call["qkv"].unflatten(-1, (-1, self.head_dim)).split((self.q_heads, self.k_heads, self.k_heads), dim=1)

    def right(self, call):
        cos, sin = self.tables(call["slots"].device, torch.float64)
        q, k, v = self._parts(call)
        found = {}
        for name, x in (("q", q), ("k", k)):
            x = x.double()
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * call[f"{name} weight"].double()
            where = {"layout": self.layout, "seq_format": "thd", "positions": call["positions"]}
            found[name] = reference.rotate(normed, cos, sin, **where)
        return found | {"stored k": found["k"], "stored v": v}

    def stored(self, cache, rows):
        return {f"stored {cache[0]}": rows}

    def ours(self, device):
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "eps": EPS, "layout": self.layout, "seq_format": "thd"}

        def run(call):
            q, k, v = self._parts(call)
            weights = call["q weight"], call["k weight"]
            q, k = ropelab.apply_qk_norm_rope(q, k, *weights, positions=call["positions"], **options)
            for name, x in zip(self.cached, (k, v), strict=True):
                call[name].flatten(0, 1).index_copy_(0, call["slots"], x)
            return {"q": q, "k": k}

        return run

    def vllm(self, operators, device):
        cos, sin = (table.to(self.work.dtype) for table in self.tables(device))
        operator, (hq, hk, d) = operators.fused_qknorm_rope_cache, (self.q_heads, self.k_heads, self.head_dim)

        def run(call):
            q, k, v = (call["qkv"].new_empty(self.tokens, heads * d) for heads in (hq, hk, hk))
            weights = call["q weight"], call["k weight"]
            caches = (call[name] for name in self.cached)
            operator(
                q, k, v, call["qkv"], *weights, cos, sin, call["positions"], call["slots"], *caches,
                d, hq, hk, d // 2, EPS, 0.0,
            )  # fmt: skip
            return {"q": q.view(-1, hq, d), "k": k.view(-1, hk, d)}

        return run


@dataclass(frozen=True)
class LatentCache(Operation):
    """The rotation of multi-head latent attention in place, and the latent vector and k into one cache.

    The sizes are the sizes of DeepSeek-V3. Each of 128 heads has 192 features, and the last 64 features rotate. The
    latent vector has 512 features.

    - ``q``: ``[tokens, 128, 192]``.
    - ``kv``: the projection ``[tokens, 576]``. Its last 64 features are the k that all heads share.
    - ``latent``: the normalized rest of the projection, ``[tokens, 512]``.
    - ``cache``: ``[pages, PAGE, 576]``.
    """

    name = "MLA, rotation, cache"
    layout = "interleaved"
    heads = (128, 9)
    head_dim = 64
    roundings = 6
    """The table, two products and a difference are rounded, and the result: each by one unit roundoff relative to the
    pair, times at most sqrt(2) where both members of a pair contribute."""
    cached = ("cache",)

    latent: ClassVar[int] = 512
    whole_head: ClassVar[int] = 192

    def caches(self, pages, draw):
        return {"cache": draw(pages, PAGE, self.latent + self.head_dim)}

    def inputs(self, draw):
        entry = self.latent + self.head_dim
        return {
            "q": draw(self.tokens, self.heads[0], self.whole_head),
            "kv": draw(self.tokens, entry),
            "latent": draw(self.tokens, self.latent),
        }

    def _parts(self, call: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return call["q"][..., -self.head_dim :], call["kv"][:, -self.head_dim :]

    def to_copy(self, call):
        q, k = self._parts(call)
        return q, torch.cat((call["latent"], k), dim=-1)

    def right(self, call):
        cos, sin = self.tables(call["slots"].device, torch.float64)
        where = {"layout": self.layout, "seq_format": "thd", "positions": call["positions"]}
        q, k = self._parts(call)
        q, k = (reference.rotate(x, cos, sin, **where) for x in (q, k[:, None]))
        kept = call["q"][..., : -self.head_dim]
        found = {"q": q, "k": k[:, 0], "features of q that do not rotate": kept}
        return found | {"stored latent": call["latent"], "stored k": k[:, 0]}

    def stored(self, cache, rows):
        return {"stored latent": rows[:, : self.latent], "stored k": rows[:, self.latent :]}

    def ours(self, device):
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.layout, "seq_format": "thd", "inplace": True}

        def run(call):
            q, k = self._parts(call)
            ropelab.apply_rope(q, k[:, None], positions=call["positions"], **options)
            rows = call["cache"].flatten(0, 1)
            rows[:, : self.latent].index_copy_(0, call["slots"], call["latent"])
            rows[:, self.latent :].index_copy_(0, call["slots"], k)
            return self._results(call)

        return run

    def vllm(self, operators, device):
        table = torch.cat(self.tables(device), dim=-1).to(self.work.dtype)
        scale, operator = torch.ones(1, device=device), operators.concat_and_cache_mla_rope_fused

        def run(call):
            q, k = self._parts(call)
            operator(call["positions"], q, k, call["latent"], table, False, call["slots"], call["cache"], "auto", scale)
            return self._results(call)

        return run

    def _results(self, call: Tensors) -> Tensors:
        q, k = self._parts(call)
        return {"q": q, "k": k, "features of q that do not rotate": call["q"][..., : -self.head_dim]}
