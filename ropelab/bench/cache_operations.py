"""Operations of an inference engine: a rotation, and a write into the paged cache of attention.

A slot is the place of a token in a cache. Page ``s // PAGE`` has the slot ``s`` at the place ``s % PAGE``.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

import ropelab
from ropelab import reference
from ropelab.bench import packages, same_places, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.operation import PUBLISHED, Contender, Operation
from ropelab.bench.peers import flashinfer, torch_library
from ropelab.bench.peers.flashinfer import APPEND, NORM_APPEND, NORM_APPEND_HEADS, cos_sin_cache
from ropelab.bench.peers.torch_library import Operators
from ropelab.bench.workloads import Workload
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8

OURS, SEPARATE, VLLM, FLASHINFER = "ropelab, one launch", "ropelab, separate launches", "vLLM", "FlashInfer"
FLASHINFER_VERSION = "0.7.2.post1"
PAGE = 16
"""Tokens in a page, as by default in vLLM."""
POSITIONS = 8192
"""Rows of the tables."""
MOST_DECODED = 64
"""Up to this number, every token belongs to another sequence. More tokens are one prompt."""
EPS = 1e-6
SCALE = 2.0**-4
"""The scale of all 8-bit floats: values up to 28 are finite. FlashInfer multiplies by the reciprocal; with a power of
two the product is the quotient."""

Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], Tensors]
"""A function of the tensors of a call that returns the rotated tensors. It writes into the caches of the call, and may
overwrite q and k."""


@dataclass(frozen=True)
class CacheOperation(Operation):
    """A rotation with a write into a cache, for ``tokens`` tokens.

    Every call has int64 ``positions`` and ``slots`` ``[tokens]``, and caches ``[pages, PAGE, ...]``, which all calls
    share. Each call writes to slots of its own.

    Attributes:
        tokens: the number of tokens.
        layout: as for `ropelab.apply_rope`.
        float8: the caches are in float8_e4m3fn instead of the dtype of q.
        float8_q: the results for q are in float8_e4m3fn, as FlashInfer writes them.
    """

    tokens: int
    layout: str
    float8: bool = False
    float8_q: bool = False

    of_contenders = PUBLISHED
    scaled = True
    name: ClassVar[str]
    head_dim: ClassVar[int]
    roundings: ClassVar[float]
    """The error of a head that is allowed, in unit roundoffs: see `ropelab.bench.agreement`."""
    cached: ClassVar[tuple[str, ...]]
    """The names of the caches."""
    flashinfer_function: ClassVar[str | None] = None
    """The name of FlashInfer's function that computes the operation; None if there is none."""

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Heads of q, and heads that the operation reads beside q. An entry of the cache counts as heads of k."""

    @property
    def columns(self):
        work = self.work.columns
        dtypes = ["float8_e4m3fn" if narrow else work["dtype"] for narrow in (self.float8, self.float8_q)]
        found = {"operation": self.name, "tokens": self.tokens, "cache": dtypes[0], "q_out": dtypes[1]}
        found |= {name: work[name] for name in ("q_heads", "k_heads", "head_dim", "dtype", "layout")}
        return found | {"bytes": self.bytes}

    @property
    def description(self):
        marks = ["8-bit cache"] * self.float8 + ["8-bit q"] * self.float8_q
        return ", ".join([self.name, self.layout, f"{self.heads[0]} heads", f"{self.tokens} tokens", *marks])

    @property
    def work(self) -> Workload:
        """The tensors to read, as a workload: it knows how many sets of tensors exceed a cache."""
        heads = (*self.heads, self.head_dim, self.head_dim)
        return Workload(self.name, 1, self.tokens, *heads, layout=self.layout)

    @property
    def bytes(self) -> int:
        """The bytes that must move: q, k and v are read once, and each result is written once."""
        read = self.work.bytes // 2
        q = read * self.heads[0] // sum(self.heads)
        return read + q // (2 if self.float8_q else 1) + (read - q) // (2 if self.float8 else 1)

    def tables(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Cosines and sines ``[POSITIONS, R/2]``."""
        return list(ropelab.rotary_table(POSITIONS, self.head_dim, dtype=dtype, device=device))

    def scale(self, device: torch.device | str) -> torch.Tensor:
        """The scale of 8-bit floats, float32 ``[1]``."""
        return torch.full((1,), SCALE, device=device)

    def scales(self, device: torch.device | str) -> Tensors:
        """The given scales, as `ropelab.rope_and_cache` takes them."""
        narrow = {"k_scale": self.float8, "v_scale": self.float8, "q_scale": self.float8_q}
        return {name: self.scale(device) for name, is_narrow in narrow.items() if is_narrow}

    def cache_of(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the dtype of the caches."""
        return to_float8(x, FLOAT8_DTYPES[0]) if self.float8 else x

    def sets(self, device, count: int | None = None):
        count = self.work.cold_count(timing.cache_bytes()) if count is None else count
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.work.dtype)

        decodes = self.tokens <= MOST_DECODED
        pages = self.tokens if decodes else self.tokens // PAGE
        caches = self.caches(2 * count * pages, draw)
        sets = []
        for mine in torch.randperm(2 * count * pages, generator=generator, device=device)[: count * pages].split(pages):
            if decodes:
                positions = torch.randint(POSITIONS, (self.tokens,), generator=generator, device=device)
                slots = mine * PAGE + positions % PAGE
            else:
                positions = torch.arange(self.tokens, device=device)
                slots = (mine[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
            found = {"positions": positions, "slots": slots} | caches | self.inputs(draw)
            sets.append(found | self.for_flashinfer(found, decodes))
        return sets

    def contenders(self, sets, device):
        found: dict[str, Contender] = {OURS: Contender(self.ours(device))}
        if separate := self.separate(device):
            found[SEPARATE] = Contender(separate)
        try:
            operators = torch_library.operators("vllm")
            if run := self.vllm(operators, device):
                found[VLLM] = Contender(run, operators.about)
        except packages.NotInstalled as error:
            found[VLLM] = Contender(f"not run: {error}")
        if self.flashinfer_function:
            try:
                function = flashinfer.function(FLASHINFER_VERSION, self.flashinfer_function)
                found[FLASHINFER] = Contender(self.flashinfer(function, device), {"version": FLASHINFER_VERSION})
            except (packages.NotInstalled, ValueError) as error:  # ValueError: there is no kernel for this GPU
                found[FLASHINFER] = Contender(f"not run: {error}")
        return found

    def check(self, run, call, step=""):
        """``"ok"`` if a run agrees with float64, writes the slots of its tokens, and leaves all other slots alone."""
        fresh = {name: x.clone() for name, x in call.items()}
        right, slots = self.right(call), call["slots"]
        with torch.no_grad():
            found = dict(run(fresh))
        for name in self.cached:
            found |= self.stored(name, rows(fresh, name, slots))
        found_others, right_others = (other_slots(x, slots, *self.cached) for x in (fresh, call))
        # A run may write the rotated k to the cache only.
        right = {name: y for name, y in right.items() if name in found or name != "k"}
        return disagreement(found | found_others, right | right_others, self.roundings, scale=SCALE)

    @abstractmethod
    def caches(self, pages: int, draw: Callable[..., torch.Tensor]) -> Tensors:
        """Caches with random contents; ``draw(*shape)`` draws in the dtype of the workload."""

    @abstractmethod
    def inputs(self, draw: Callable[..., torch.Tensor]) -> Tensors:
        """The tensors of a call but positions, slots and caches."""

    @abstractmethod
    def right(self, call: Tensors) -> Tensors:
        """The right results of a run and of `stored`: see `ropelab.bench.agreement`."""

    @abstractmethod
    def stored(self, cache: str, rows: torch.Tensor) -> Tensors:
        """The tensors that a run stored, by the names that `right` has; ``rows`` are the slots of the tokens."""

    @abstractmethod
    def arguments(self, call: Tensors) -> Tensors:
        """The tensors that `ropelab.rope_and_cache` takes, by its names, but slots, positions, tables and scales."""

    @abstractmethod
    def results(self, call: Tensors, q: torch.Tensor) -> Tensors:
        """The rotated tensors by the names that `right` has, after a run that returned ``q``."""

    def ours(self, device: torch.device | str) -> Run:
        """The one launch of ropelab."""
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.layout, **self.scales(device)}

        def run(call):
            where = {"slot_mapping": call["slots"], "positions": call["positions"]}
            return self.results(call, ropelab.rope_and_cache(**self.arguments(call), **where, **options))

        return run

    def separate(self, device: torch.device | str) -> Run | None:
        """The launches of ropelab without the one launch; None for 8-bit floats.

        The launches are a rotation, and ``index_copy_`` for every tensor to store.
        """
        return None

    def vllm(self, operators: Operators, device: torch.device | str) -> Run | None:
        """The fused operator of vLLM, called as vLLM's Python function calls the operator; None if there is none."""
        return None

    def for_flashinfer(self, call: Tensors, decodes: bool) -> Tensors:
        """The tensors of a call that only FlashInfer's function takes.

        Args:
            decodes: every token belongs to a sequence of its own; otherwise all tokens are one prompt.
        """
        return pages_of(call["slots"]) if self.float8_q else {}

    def flashinfer(self, function: Callable, device: torch.device | str) -> Run:
        """The call of `flashinfer_function`."""
        raise NotImplementedError(f"{self.name}: FlashInfer has no function for it")


def rows(call: Tensors, cache: str, slots: torch.Tensor) -> torch.Tensor:
    """The rows of a cache in these slots."""
    return as_bytes(call[cache]).flatten(0, 1)[slots].view(call[cache].dtype)


def other_slots(call: Tensors, slots: torch.Tensor, *caches: str) -> Tensors:
    """The bytes of caches in all other slots, as ``"<cache>, other slots"``."""
    flat = {f"{name}, other slots": as_bytes(call[name]).flatten(0, 1) for name in caches}
    others = torch.ones(len(next(iter(flat.values()))), dtype=torch.bool, device=slots.device)
    others.index_fill_(0, slots, False)
    return {name: x[others] for name, x in flat.items()}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, as vLLM's operators take them."""
    return x.view(torch.uint8) if x.dtype in FLOAT8_DTYPES else x


def pages_of(slots: torch.Tensor) -> Tensors:
    """The tensors by which FlashInfer finds the slots: every token is in a request of one page."""
    return {
        "kv_indices": (slots // PAGE).int(),
        "kv_indptr": torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
        "batch_indices": torch.arange(len(slots), dtype=torch.int32, device=slots.device),
        "places": (slots % PAGE).int(),
    }


def requests_of(positions: torch.Tensor, slots: torch.Tensor, decodes: bool) -> Tensors:
    """The requests by which FlashInfer's `NORM_APPEND` finds positions and slots: `decodes` as in `for_flashinfer`."""
    tokens, device = len(slots), slots.device
    requests = torch.arange(tokens, device=device) if decodes else torch.zeros_like(slots)
    pages = torch.zeros(tokens if decodes else 1, POSITIONS // PAGE, dtype=torch.int32, device=device)
    pages[requests, positions // PAGE] = (slots // PAGE).int()
    starts = range(tokens + 1) if decodes else (0, tokens)
    return {
        "seq_lens": (positions + 1 if decodes else positions[-1:] + 1).int(),
        "q_indptr": torch.tensor(starts, dtype=torch.int32, device=device),
        "page_indices": pages,
    }


def _flashinfer_options(call: Tensors, layout: str) -> dict[str, object]:
    """The arguments of FlashInfer's function that are the same for all heads."""
    return {
        "pos_ids": call["positions"], "kv_indices": call["kv_indices"], "kv_indptr": call["kv_indptr"],
        "batch_indices": call["batch_indices"], "positions": call["places"], "page_size": PAGE,
        "is_neox": layout == "split_half", "quant_scale_q": 1 / SCALE, "quant_scale_kv": 1 / SCALE,
    }  # fmt: skip


@dataclass(frozen=True)
class NormAndCache(CacheOperation):
    """QK norm and rotation, and k and v into caches ``[pages, PAGE, Hk, D]``. The input is a packed qkv.

    Attributes:
        q_heads, k_heads: the heads of q, and of k and of v.
        norm: normalize the heads before the rotation.
    """

    layout: str = "split_half"
    q_heads: int = 32
    k_heads: int = 8
    norm: bool = True

    name = "QK norm, rotation, cache"
    head_dim = 128
    roundings = 12
    """The error that is allowed, as in `ropelab.bench.qk_norm.status`."""
    cached = ("k cache", "v cache")

    @property
    def heads(self):
        return self.q_heads, 2 * self.k_heads

    @property
    def columns(self):
        return super().columns | {"operation": self.name if self.norm else "rotation, cache"}

    def caches(self, pages, draw):
        return {name: self.cache_of(draw(pages, PAGE, self.k_heads, self.head_dim)) for name in self.cached}

    def inputs(self, draw):
        heads = self.q_heads + 2 * self.k_heads
        weights = {name: draw(self.head_dim) for name in ("q weight", "k weight")} if self.norm else {}
        found = {"qkv": draw(self.tokens, heads * self.head_dim)} | weights
        if self.float8_q:
            found["q out"] = to_float8(draw(self.tokens, self.q_heads, self.head_dim), FLOAT8_DTYPES[0])
        return found

    def to_copy(self, call, step=""):
        return (call["qkv"],)

    def places(self, call, step=""):
        if not (self.float8 or self.float8_q):
            return ()
        qkv, parts, first = call["qkv"], [], 0
        for heads, narrow in zip(self.heads, (self.float8_q, self.float8), strict=True):
            width = heads * self.head_dim
            target = qkv.new_empty(len(qkv), width, dtype=torch.int8 if narrow else qkv.dtype)
            parts.append(same_places.Part(qkv, target, width, first))
            first += width
        return parts

    def parts(self, call: Tensors) -> tuple[torch.Tensor, ...]:
        """q, k and v, views of the packed qkv."""
        return call["qkv"].unflatten(-1, (-1, self.head_dim)).split((self.q_heads, self.k_heads, self.k_heads), dim=1)

    def right(self, call):
        cos, sin = self.tables(call["slots"].device, torch.float64)
        q, k, v = self.parts(call)
        found = {}
        for name, x in (("q", q), ("k", k)):
            x = x.double()
            if self.norm:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * call[f"{name} weight"].double()
            where = {"layout": self.layout, "seq_format": "thd", "positions": call["positions"]}
            found[name] = reference.rotate(x, cos, sin, **where)
        return found | {"stored k": found["k"], "stored v": v.double() if self.float8 else v}

    def stored(self, cache, rows):
        return {f"stored {cache[0]}": rows}

    def _weights(self, call: Tensors) -> dict[str, object]:
        if not self.norm:
            return {}
        return {"q_weight": call["q weight"], "k_weight": call["k weight"], "eps": EPS}

    def arguments(self, call):
        names = ("q", "k", "v", "key_cache", "value_cache")
        found = dict(zip(names, (*self.parts(call), *(call[name] for name in self.cached)), strict=True))
        return found | {"q_out": call.get("q out")} | self._weights(call)

    def results(self, call, q):
        return {"q": q}

    def separate(self, device):
        if self.float8 or self.float8_q:
            return None
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.layout, "seq_format": "thd"}

        def run(call):
            q, k, v = self.parts(call)
            rotate = ropelab.apply_qk_norm_rope if self.norm else ropelab.apply_rope
            q, k = rotate(q, k, positions=call["positions"], **self._weights(call), **options)
            for name, x in zip(self.cached, (k, v), strict=True):
                call[name].flatten(0, 1).index_copy_(0, call["slots"], x)
            return {"q": q, "k": k}

        return run

    def vllm(self, operators, device):
        if not self.norm or self.layout != "split_half" or self.float8_q:
            return None
        cos, sin = (table.to(self.work.dtype) for table in self.tables(device))
        operator, (hq, hk, d) = operators.fused_qknorm_rope_cache, (self.q_heads, self.k_heads, self.head_dim)
        quantized = ("fp8", self.scale(device), self.scale(device)) if self.float8 else ()

        def run(call):
            q, k, v = (call["qkv"].new_empty(self.tokens, heads * d) for heads in (hq, hk, hk))
            weights = call["q weight"], call["k weight"]
            caches = (as_bytes(call[name]) for name in self.cached)
            operator(
                q, k, v, call["qkv"], *weights, cos, sin, call["positions"], call["slots"], *caches,
                d, hq, hk, d // 2, EPS, 0.0, *quantized,
            )  # fmt: skip
            return {"q": q.view(-1, hq, d), "k": k.view(-1, hk, d)}

        return run

    @property
    def flashinfer_function(self):
        heads = (self.q_heads, self.k_heads) == NORM_APPEND_HEADS
        if self.norm and heads and self.layout == "split_half" and not (self.float8 or self.float8_q):
            return NORM_APPEND
        return APPEND if not self.norm and self.float8 and self.float8_q else None

    def for_flashinfer(self, call, decodes):
        if self.flashinfer_function != NORM_APPEND:
            return super().for_flashinfer(call, decodes)
        weights = {f"{name}, float32": call[name].float() for name in ("q weight", "k weight")}
        return weights | requests_of(call["positions"], call["slots"], decodes)

    def flashinfer(self, function, device):
        table = cos_sin_cache(*self.tables(device))
        if self.flashinfer_function == NORM_APPEND:
            options = {"num_q_heads": self.q_heads, "num_kv_heads": self.k_heads, "qk_norm_policy": 2, "eps": EPS}

            def run_with_norm(call):
                where = (call[name] for name in ("seq_lens", "q_indptr", "page_indices", *self.cached))
                weights = {f"{name}_norm_weight": call[f"{name} weight, float32"] for name in ("q", "k")}
                q = function(call["qkv"], table, *where, **weights, **options, clear_unused_last_page_rows=False)
                return {"q": q}

            return run_with_norm

        def run(call):
            q, k, v = self.parts(call)
            caches = tuple(call[name] for name in self.cached)
            q, _ = function(
                q, k, None, None, v, table, paged_kv_cache=caches, q_rope_out=call["q out"],
                **_flashinfer_options(call, self.layout),
            )  # fmt: skip
            return {"q": q}

        return run


@dataclass(frozen=True)
class LatentCache(CacheOperation):
    """The rotation of multi-head latent attention in place, and the latent vector and k into one cache.

    The sizes are the sizes of DeepSeek-V3. Each of 128 heads has 192 features, and the last 64 features rotate. The
    latent vector has 512 features.

    - ``q``: ``[tokens, 128, 192]``.
    - ``kv``: the projection ``[tokens, 576]``. Its last 64 features are the k that all heads share.
    - ``latent``: the normalized rest of the projection, ``[tokens, 512]``.
    - ``cache``: ``[pages, PAGE, 576]``.
    """

    layout: str = "interleaved"

    name = "MLA, rotation, cache"
    heads = (128, 9)
    head_dim = 64
    roundings = 6
    """The table, two products, a difference and the result are rounded. Each rounding is one unit roundoff relative to
    the pair, times at most sqrt(2) where both members of a pair contribute."""
    cached = ("cache",)

    latent: ClassVar[int] = 512
    whole_head: ClassVar[int] = 192

    def caches(self, pages, draw):
        return {"cache": self.cache_of(draw(pages, PAGE, self.latent + self.head_dim))}

    def inputs(self, draw):
        entry = self.latent + self.head_dim
        return {
            "q": draw(self.tokens, self.heads[0], self.whole_head),
            "kv": draw(self.tokens, entry),
            "latent": draw(self.tokens, self.latent),
        }

    def parts(self, call: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The features of q, and of the projection, that rotate."""
        return call["q"][..., -self.head_dim :], call["kv"][:, -self.head_dim :]

    def to_copy(self, call, step=""):
        q, k = self.parts(call)
        return q, torch.cat((call["latent"], k), dim=-1)

    def places(self, call, step=""):
        _, entries = self.to_copy(call)
        q = same_places.in_place(call["q"], self.whole_head - self.head_dim, self.head_dim)
        return q, same_places.to_new(entries, 1 if self.float8 else None)

    def right(self, call):
        cos, sin = self.tables(call["slots"].device, torch.float64)
        where = {"layout": self.layout, "seq_format": "thd", "positions": call["positions"]}
        q, k = self.parts(call)
        q, k = (reference.rotate(x, cos, sin, **where) for x in (q, k[:, None]))
        kept = call["q"][..., : -self.head_dim]
        found = {"q": q, "k": k[:, 0], "features of q that do not rotate": kept}
        latent = call["latent"].double() if self.float8 else call["latent"]
        return found | {"stored latent": latent, "stored k": k[:, 0]}

    def stored(self, cache, rows):
        return {"stored latent": rows[:, : self.latent], "stored k": rows[:, self.latent :]}

    def ours(self, device):
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.layout}
        options |= {"kv_scale": self.scale(device)} if self.float8 else {}

        def run(call):
            q, k = self.parts(call)
            where = {"positions": call["positions"], "q_out": q}
            ropelab.mla_rope_and_cache(q, k, call["latent"], call["cache"], call["slots"], **where, **options)
            return self.results(call)

        return run

    def separate(self, device):
        if self.float8:
            return None
        cos, sin = self.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.layout, "seq_format": "thd", "inplace": True}

        def run(call):
            q, k = self.parts(call)
            ropelab.apply_rope(q, k[:, None], positions=call["positions"], **options)
            rows = call["cache"].flatten(0, 1)
            rows[:, : self.latent].index_copy_(0, call["slots"], call["latent"])
            rows[:, self.latent :].index_copy_(0, call["slots"], k)
            return self.results(call) | {"k": self.parts(call)[1]}

        return run

    def vllm(self, operators, device):
        table = torch.cat(self.tables(device), dim=-1).to(self.work.dtype)
        scale, operator = self.scale(device), operators.concat_and_cache_mla_rope_fused
        kind, is_neox = "fp8" if self.float8 else "auto", self.layout == "split_half"

        def run(call):
            q, k = self.parts(call)
            cache = as_bytes(call["cache"])
            operator(call["positions"], q, k, call["latent"], table, is_neox, call["slots"], cache, kind, scale)
            return self.results(call) | {"k": self.parts(call)[1]}

        return run

    def arguments(self, call):
        q, k = self.parts(call)
        v_cache, k_cache = call["cache"].unsqueeze(2).split((self.latent, self.head_dim), dim=-1)
        return {
            "q": q, "k": k[:, None], "v": call["latent"][:, None], "key_cache": k_cache, "value_cache": v_cache,
            "q_out": q,
        }  # fmt: skip

    def results(self, call, q=None):
        return {"q": self.parts(call)[0], "features of q that do not rotate": call["q"][..., : -self.head_dim]}


@dataclass(frozen=True)
class WholeLatentCache(CacheOperation):
    """All features of q of absorbed latent attention, and the latent vector and k, into 8-bit floats.

    - ``q``: ``[tokens, 128, 192]``, whose last 64 features rotate.
    - ``absorbed``: ``[tokens, 128, 512]``, the features of q that do not rotate.
    - ``kv``, ``latent``: as in `LatentCache`.
    - ``q out``: ``[tokens, 128, 576]``, the features of ``absorbed`` and the rotated features.
    - ``latent cache`` and ``k cache``: ``[pages, PAGE, 512]`` and ``[pages, PAGE, 64]``.
    """

    layout: str = "interleaved"
    float8: bool = True
    float8_q: bool = True

    name = "MLA, rotation, 8-bit q and cache"
    heads = (9 * 128, 9)
    head_dim = 64
    roundings = 6
    cached = ("latent cache", "k cache")
    flashinfer_function = APPEND

    def caches(self, pages, draw):
        return {"latent cache": self.cache_of(draw(pages, PAGE, 512)), "k cache": self.cache_of(draw(pages, PAGE, 64))}

    def inputs(self, draw):
        return {
            "q": draw(self.tokens, 128, 192), "absorbed": draw(self.tokens, 128, 512), "kv": draw(self.tokens, 576),
            "latent": draw(self.tokens, 512), "q out": to_float8(draw(self.tokens, 128, 576), FLOAT8_DTYPES[0]),
        }  # fmt: skip

    def to_copy(self, call, step=""):
        q = torch.cat((call["absorbed"], call["q"][..., 128:]), dim=-1)
        return q, torch.cat((call["latent"], call["kv"][:, 512:]), dim=-1)

    def places(self, call, step=""):
        return [same_places.to_new(x, 1) for x in self.to_copy(call)]

    def right(self, call):
        cos, sin = self.tables(call["slots"].device, torch.float64)
        where = {"layout": self.layout, "seq_format": "thd", "positions": call["positions"]}
        q, k = (reference.rotate(x, cos, sin, **where) for x in (call["q"][..., 128:], call["kv"][:, None, 512:]))
        return {
            "q": q, "other q": call["absorbed"].double(), "stored latent": call["latent"].double(),
            "stored k": k[:, 0],
        }  # fmt: skip

    def stored(self, cache, rows):
        return {f"stored {cache.removesuffix(' cache')}": rows}

    def results(self, call, q=None):
        return {"q": call["q out"][..., 512:], "other q": call["q out"][..., :512]}

    def arguments(self, call):
        outs = self.results(call)
        return {
            "q": call["q"][..., 128:], "k": call["kv"][:, None, 512:], "v": call["latent"][:, None],
            "key_cache": call["k cache"][:, :, None], "value_cache": call["latent cache"][:, :, None],
            "q_out": outs["q"], "q_nope": call["absorbed"], "q_nope_out": outs["other q"],
        }  # fmt: skip

    def flashinfer(self, function, device):
        table = cos_sin_cache(*self.tables(device))

        def run(call):
            outs = self.results(call)
            function(
                call["q"][..., 128:], call["kv"][:, 512:], call["absorbed"], call["latent"], None, table,
                paged_kv_cache=(call["latent cache"], call["k cache"]), q_rope_out=outs["q"],
                q_nope_out=outs["other q"], **_flashinfer_options(call, self.layout),
            )  # fmt: skip
            return outs

        return run
