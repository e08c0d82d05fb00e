"""The operators of ropelab, an entry for each way to call one, from which ``test_table_*.py`` make their tests.

An entry of `OPERATORS` says what its operator reads, writes, differentiates and computes: the definition in float64,
and how often a result is rounded. `arguments` makes a valid call of an entry, and `results` its outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

import ropelab
from ropelab import NO_POSITION, reference
from ropelab.kernels import INTERPRETED
from ropelab.layout.seq_format import from_bshd, to_bshd

FLOAT8 = torch.float8_e4m3fn
ROWS = 40
Call = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, and what its tensors have in common.

    Attributes:
        pairs: the pairs of features of a head that rotate.
        rest: further features of a head, where the operator leaves their number open.
    """

    batch: int = 2
    tokens: int = 3
    heads: int = 3
    kv_heads: int = 1
    pairs: int = 4
    rest: int = 3
    seq_format: str = "bshd"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(self.device, dtype or self.dtype)

    def heads_of(self, heads: int, features: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Heads of all tokens in the format of the call; ``thd`` has the tokens of all batches."""
        x = self.draw(self.batch, self.tokens, heads, features, dtype=dtype)
        return x.flatten(0, 1) if self.seq_format == "thd" else from_bshd(x, self.seq_format).contiguous()

    @property
    def turning(self) -> int:
        """The features of a head that rotate."""
        return 2 * self.pairs

    @property
    def first(self) -> int:
        """The first feature of a slice of a head that rotates."""
        return 2 + self.pairs % 2

    @property
    def head_dim(self) -> int:
        """The features of a head of which a slice rotates."""
        return self.first + self.turning + max(1, self.rest - 2)

    @property
    def slots(self) -> torch.Tensor:
        """A slot for each token, the last tokens first, and none for the second."""
        slots = torch.arange(self.batch * self.tokens, device=self.device).flip(0)
        slots[1:2] = -1
        return slots if self.dtype.itemsize > 2 else slots.int()

    @property
    def slot_mapping(self) -> torch.Tensor:
        """`slots`; of many tokens the last have none."""
        return self.slots[: 15 if self.batch == 1 else None]


@dataclass(frozen=True)
class OpSpec:
    """An operator, called in one way.

    Attributes:
        function: the public function.
        tensors: makes the arguments of a call, apart from angles and positions.
        definition: a call -> the results, and by name what it leaves in the tensors that it writes: in torch operations
            that compute in float64, and are differentiable.
        written: the arguments that a call writes.
        leaves: the arguments that a caller may differentiate.
        options: further arguments.
        full_width: the tables have a column for each feature and not for each pair.
        any_size: heads may have any number of features; otherwise four pairs rotate.
        roundings: a call -> how often an element is rounded in the arithmetic, and then in the dtype of the result;
            None where the file of the operator has the bound.
        once: reverse mode differentiates no more than once.
        fixed: the arguments whose features must lie side by side.
        bits: both backends sum in the same order, so that their results have the same bits.
    """

    function: Callable
    tensors: Callable[[Sizes], Call]
    definition: Callable[[Call], tuple[tuple, Call]] | None = None
    written: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    options: Call = field(default_factory=dict)
    full_width: bool = False
    any_size: bool = True
    roundings: Callable[[Call], tuple[int, int]] | None = lambda call: (2, 1)
    once: bool = False
    fixed: tuple[str, ...] = ()
    bits: bool = True

    @property
    def parameters(self) -> set[str]:
        return {*signature(self.function).parameters}

    @property
    def where(self) -> list[str]:
        """The ways to say where the tokens are, and by what they turn."""
        found = ["positions", "start"] if "deltas" in self.parameters else ["positions", "offsets", "start", "rows"]
        norm = "eps" in self.parameters and "q_weight" in self.tensors(Sizes())
        found += ["each"] * ("seq_format" in self.parameters and self.function is not ropelab.qkv_rope_and_cache)
        found += ["axes"] if "axes" in self.parameters else []
        return found + ["frequencies"] * ("frequencies" in self.parameters and not (norm and self.once))


# --------------------------------------------------------------------------------------------------- the definitions


def turned(x: torch.Tensor, call: Call, **changes: Any) -> torch.Tensor:
    """``x`` rotated as the call says, in float64."""
    call = call | changes
    names = {*signature(reference.rotate).parameters} - {"x"}
    return reference.rotate(x, **{name: value for name, value in call.items() if name in names and value is not None})


def has_position(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Which tokens of ``x`` have a position along any axis."""
    axes = range(len(call["positions"])) if call.get("axes") else None
    rows = torch.ones(ROWS, len(axes or "1"), device=x.device)
    pairs = torch.ones(*x.shape[:-1], 2 * rows.shape[-1], device=x.device)
    where = {"cos": rows, "sin": 0 * rows, "axes": axes, "rotary_slice": None}
    return turned(pairs, call, **where).bool().any(-1, keepdim=True)


def normed(x: torch.Tensor, weight: torch.Tensor, call: Call, offset: float = 0.0) -> torch.Tensor:
    """The RMS norm of heads, or of all heads of a token; what a token without a position holds does not matter."""
    across = x.shape[-1] != len(weight)
    x = torch.where(has_position(x, call), x.double(), 1.0)
    seq_format = call.get("seq_format", "thd")
    rows = to_bshd(x, seq_format).flatten(-2) if across else x
    rows = rows / (rows.square().mean(-1, keepdim=True) + call.get("eps", 1e-6)).sqrt() * (weight.double() + offset)
    return from_bshd(rows.unflatten(-1, (-1, x.shape[-1])), seq_format) if across else rows


def stored(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The cache with the rows of the tokens in their slots."""
    if cache.dtype == FLOAT8:
        rows = (rows / (1.0 if scale is None else scale.double())).clamp(-448, 448)
    found = cache.double().clone().flatten(0, 1)
    kept = slots >= 0
    found[slots[kept]] = rows[: len(slots)][kept].to(found.dtype)
    return found.view(cache.shape)


def rope(call: Call):
    found = {name: turned(call[name], call) for name in "qk" if name in call}
    return tuple(found.values()), found


def norm_rope(call: Call):
    return tuple(turned(normed(call[x], call[f"{x}_weight"], call), call) for x in "qk"), {}


def latent(call: Call):
    """Query, key and value of latent attention, as far as the call has them."""
    nope_dim = call["nope_dim"] if "nope_dim" in call else call["q"].shape[-1] - call["k_pe"].shape[-1]
    rotary_dim = call["k_pe"].shape[-1] if "k_pe" in call else call["q"].shape[-1] - nope_dim
    tail = {"rotary_slice": (nope_dim, nope_dim + rotary_dim)}
    query = (turned(call["q"], call, **tail),) if "q" in call else ()
    if "kv" not in call:
        return query, {"q": query[0]}
    kv = call["kv"].double()
    k_pe = call["k_pe"].double().expand(*kv.shape[:-1], -1)
    key = turned(torch.cat((kv[..., :nope_dim], k_pe), -1), call, **tail)
    return (*query, key, kv[..., nope_dim:]), dict(zip("q", query, strict=bool(query)))


def cached(call: Call):
    """q, and both caches; with weights after a norm, and with features of q apart."""
    q, k, v = (call[name].double() for name in "qkv")
    if "q_weight" in call:
        q, k = (normed(x, call[f"{name}_weight"], call) for x, name in ((q, "q"), (k, "k")))
    seq_format = call.get("seq_format", "thd")
    q, k = turned(q, call), turned(k, call)
    rows = (to_bshd(x, seq_format).flatten(0, 1) for x in (k, v))
    caches = {
        f"{long}_cache": stored(call[f"{long}_cache"], row, call["slot_mapping"], _of_head(call, f"{short}_scale"))
        for (long, short), row in zip((("key", "k"), ("value", "v")), rows, strict=True)
    }
    if "q_scale" in call:
        q = (q / _of_head(call, "q_scale")).clamp(-448, 448)
    outs = {"q_out": q, "k_out": k, "v_out": v, "q_nope_out": call.get("q_nope")}
    return (q,), caches | {name: x for name, x in outs.items() if name in call}


def _of_head(call: Call, name: str) -> torch.Tensor | None:
    return call[name].double().view(-1, 1) if name in call else None


def latent_cached(call: Call):
    q = turned(call["q_pe"], call, seq_format="thd")
    k = turned(call["k_pe"][:, None], call, seq_format="thd")[:, 0]
    entries = torch.cat((call["kv_c"].double(), k), -1)
    cache = stored(call["kv_cache"], entries, call["slot_mapping"], _of_head(call, "kv_scale"))
    return (q,), {"kv_cache": cache, "q_out": q, "k_out": k}


def recached(call: Call):
    rows = call["key_cache"].double().flatten(0, 1)[call["slots"]]
    deltas = torch.as_tensor(call["deltas"], device=rows.device)
    deltas = deltas if call.get("axes") else deltas.expand(len(rows))
    kept = (call["slots"] >= 0) & (deltas != NO_POSITION).reshape(-1, len(rows)).any(0)
    cache = stored(
        call["key_cache"], turned(rows, call, positions=deltas, seq_format="thd"),
        torch.where(kept, call["slots"], -1), None,
    )  # fmt: skip
    return (cache,), {"key_cache": cache}


def projected(call: Call):
    """The heads of q, k and v of the product, q and k after a norm where the call has weights for it."""
    weight, bias = (
        torch.cat(tuple(x)) if isinstance(x, (tuple, list)) else x for x in (call["weight"], call.get("bias"))
    )
    y = call["x"].double() @ weight.double().T + (0 if bias is None else bias.double())
    heads = call["q_heads"], call["k_heads"], call["k_heads"]
    q, k, v = y.unflatten(-1, (sum(heads), -1)).split(heads, -2)
    if "q_weight" in call:
        q, k = normed(q, call["q_weight"], call), normed(k, call["k_weight"], call)
    return (turned(q, call), turned(k, call), v), {}


def projected_into_cache(call: Call):
    (q, k, v), _ = projected(call | {"seq_format": "thd"})
    caches = {
        name: stored(call[name], x, call["slot_mapping"], None) for name, x in (("key_cache", k), ("value_cache", v))
    }
    return (q,), caches | {"q_out": q, "k_out": k, "v_out": v}


# -------------------------------------------------------------------------------------------------------- the tensors


def q_and_k(s: Sizes) -> Call:
    return {"q": s.heads_of(s.heads, s.head_dim), "k": s.heads_of(s.kv_heads, s.head_dim)}


def with_weights(s: Sizes) -> Call:
    return q_and_k(s) | {"q_weight": s.draw(s.head_dim), "k_weight": s.draw(s.head_dim)}


def of_latent(*names: str) -> Callable[[Sizes], Call]:
    def tensors(s: Sizes) -> Call:
        nope_dim = 1 + s.rest
        made = {
            "q": s.heads_of(s.heads, nope_dim + s.turning), "kv": s.heads_of(s.heads, nope_dim + 6),
            "k_pe": s.heads_of(1, s.turning), "nope_dim": nope_dim,
        }  # fmt: skip
        return {name: made[name] for name in names}

    return tensors


def of_cache(s: Sizes) -> Call:
    return of_caches(s, s.turning + s.rest - 3)


def of_caches(s: Sizes, dim: int) -> Call:
    return {
        "q": s.heads_of(s.heads, dim), "k": s.heads_of(s.kv_heads, dim), "v": s.heads_of(s.kv_heads, 2 * s.rest),
        "slot_mapping": s.slot_mapping, "key_cache": s.draw(5, 8, s.kv_heads, dim),
        "value_cache": s.draw(5, 8, s.kv_heads, 2 * s.rest), "q_out": s.heads_of(s.heads, dim),
    }  # fmt: skip


def normed_into_cache(s: Sizes) -> Call:
    """A norm across heads, and results for all tokens."""
    made = of_cache(s)
    weights = {f"{x}_weight": s.draw(made[x].shape[-1] * n) for x, n in (("q", s.heads), ("k", s.kv_heads))}
    return made | weights | {"eps": 0.0, "k_out": torch.empty_like(made["k"]), "v_out": torch.empty_like(made["v"])}


def apart_into_cache(s: Sizes) -> Call:
    return of_caches(s, s.head_dim) | {f"q_nope{out}": s.heads_of(s.heads, 1 + s.rest) for out in ("", "_out")}


def of_8_bits(s: Sizes) -> Call:
    made = of_cache(s)
    return made | {name: made[name].to(FLOAT8) for name in ("key_cache", "value_cache", "q_out")}


def scaled_into_cache(s: Sizes) -> Call:
    return of_8_bits(s) | {f"{x}_scale": s.draw(1, dtype=torch.float32).abs() + 1 for x in "qkv"}


def making_scales(s: Sizes) -> Call:
    scales = {f"{x}_scale_cache": s.draw(5, 8, s.kv_heads, dtype=torch.float32) for x in "kv"}
    return of_8_bits(s) | scales | {"q_scale_out": s.heads_of(s.heads, 1, torch.float32)[..., 0]}


def of_latent_cache(s: Sizes) -> Call:
    tokens = s.batch * s.tokens
    return {
        "q_pe": s.heads_of(s.heads, s.turning), "k_pe": s.draw(tokens, s.turning), "kv_c": s.draw(tokens, 2 + s.rest),
        "kv_cache": s.draw(5, 8, 2 + s.rest + s.turning), "slot_mapping": s.slot_mapping,
        "q_out": s.heads_of(s.heads, s.turning), "k_out": s.draw(tokens, s.turning),
    }  # fmt: skip


def of_cached_keys(s: Sizes) -> Call:
    return {"key_cache": s.draw(5, 8, s.kv_heads, s.head_dim), "slots": s.slots}


def of_cached_8_bits(s: Sizes) -> Call:
    scales = s.draw(5, 8, s.kv_heads, dtype=torch.float32)
    dim = s.turning + s.rest - 3
    return {"key_cache": s.draw(5, 8, s.kv_heads, dim).to(FLOAT8), "k_scale_cache": scales, "slots": s.slots}


def of_quantized(s: Sizes) -> Call:
    tokens, x = s.batch * s.tokens, s.heads_of(s.heads, 8)
    out = s.draw(tokens, 1, s.heads * 8, dtype=torch.float32).to(FLOAT8)
    return {"x": x, "out": out, "scales": s.draw(tokens, 1, 2 * s.heads, dtype=torch.float32)}


def of_indexer(s: Sizes) -> Call:
    tokens, q = s.batch * s.tokens, s.heads_of(s.heads, 8)
    folded = s.draw(tokens, s.heads, dtype=torch.float32)
    return {"q": q, "weights": s.draw(tokens, s.heads), "out": q.to(FLOAT8), "weights_out": folded}


def of_block_scaled_cache(s: Sizes) -> Call:
    dtype = s.dtype if s.dtype.itemsize == 2 else torch.float16
    pages = torch.zeros(5, 8 * 24, dtype=torch.uint8, device=s.device)
    q, q_out = (s.heads_of(s.heads, 12, dtype) for _ in range(2))
    kv = s.draw(s.batch * s.tokens, 12, dtype=dtype)
    return {"q": q, "kv": kv, "kv_cache": pages, "slot_mapping": s.slot_mapping, "q_out": q_out}


def of_product(s: Sizes) -> Call:
    heads = s.heads + 2 * s.kv_heads
    return {
        "x": s.heads_of(1, 4).squeeze(-2), "weight": s.draw(heads * s.turning, 4), "bias": s.draw(heads * s.turning),
        "q_heads": s.heads, "k_heads": s.kv_heads,
    }  # fmt: skip


def of_normed_product(s: Sizes) -> Call:
    return of_product(s) | {"q_weight": s.draw(s.turning), "k_weight": s.draw(s.turning)}


def of_three_products(s: Sizes) -> Call:
    made, rows = of_product(s), [n * s.turning for n in (s.heads, s.kv_heads, s.kv_heads)]
    return made | {name: tuple(x.clone() for x in made[name].split(rows)) for name in ("weight", "bias")}


def of_product_into_cache(s: Sizes) -> Call:
    caches = {name: s.draw(5, 8, s.kv_heads, s.turning) for name in ("key_cache", "value_cache")}
    return of_product(s) | caches | {"slot_mapping": s.slot_mapping}


def of_product_and_results(s: Sizes) -> Call:
    outs = {f"{x}_out": s.heads_of(n, s.turning) for x, n in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))}
    return of_product_into_cache(s) | outs


CACHES, OUTS = ("key_cache", "value_cache"), ("q_out", "k_out", "v_out")
SLICE = {"rotary_slice": None}
"""`arguments` replaces None."""


def of_norm(features: str, roundings: int = 4) -> Callable[[Call], tuple[int, int]]:
    """The roundings of a norm over these features: of half a sum of squares, of its root, and of ``roundings`` more."""
    return lambda call: (call[features].shape[-1] // 2 + 6 + roundings, 1)


def of_sum(call: Call) -> tuple[int, int]:
    """A product of K terms and a bias, which is rounded, and a rotation."""
    return call["x"].shape[-1] + 3, 2


OPERATORS = {
    "apply_rope": OpSpec(
        ropelab.apply_rope, q_and_k, rope, leaves=("q", "k", "cos", "sin"), options=SLICE | {"inverse": True}
    ),
    "apply_rope, q alone": OpSpec(
        ropelab.apply_rope, lambda s: {"q": s.heads_of(s.heads, s.head_dim)}, rope, leaves=("q", "cos", "sin"),
        options=SLICE, full_width=True,
    ),
    "apply_rope, the other layout": OpSpec(
        ropelab.apply_rope, q_and_k, rope, leaves=("q", "k", "cos", "sin"),
        options=SLICE | {"out_layout": "interleaved"},
    ),
    "apply_rope, in place": OpSpec(
        ropelab.apply_rope, q_and_k, rope, written=("q", "k"), options=SLICE | {"inplace": True}
    ),
    "apply_qk_norm_rope": OpSpec(
        ropelab.apply_qk_norm_rope, with_weights, norm_rope, leaves=("q", "k", "q_weight", "k_weight"), options=SLICE,
        roundings=of_norm("q"), once=True, bits=False,
    ),
    "assemble_mla": OpSpec(
        ropelab.assemble_mla, of_latent("q", "kv", "k_pe"), latent, leaves=("q", "kv", "k_pe"),
        options={"out_layout": "interleaved", "inverse": True},
    ),
    "assemble_mla, in place": OpSpec(
        ropelab.assemble_mla, of_latent("q", "kv", "k_pe"), latent, written=("q",), options={"inplace": True},
        full_width=True,
    ),
    "assemble_mla, in place beside a view": OpSpec(
        ropelab.assemble_mla, of_latent("q", "kv", "k_pe"), latent, written=("q",), full_width=True,
        options={"inplace": True, "copy_value": False},
    ),
    "assemble_mla_kv": OpSpec(
        ropelab.assemble_mla_kv, of_latent("kv", "k_pe", "nope_dim"), latent, leaves=("kv", "k_pe"), full_width=True,
        options={"inverse": True},
    ),
    "assemble_mla_kv, a view": OpSpec(
        ropelab.assemble_mla_kv, of_latent("kv", "k_pe", "nope_dim"), latent, leaves=("kv", "k_pe"), full_width=True,
        options={"copy_value": False},
    ),
    "rotate_mla_query": OpSpec(
        ropelab.rotate_mla_query, of_latent("q", "nope_dim"), latent, leaves=("q",), full_width=True,
        options={"inverse": True},
    ),
    "rotate_mla_query, in place": OpSpec(
        ropelab.rotate_mla_query, of_latent("q", "nope_dim"), latent, written=("q",), options={"inplace": True},
        full_width=True,
    ),
    "rotate_mla_query, consumed": OpSpec(
        ropelab.rotate_mla_query, of_latent("q", "nope_dim"), latent, written=("q",), full_width=True,
        options={"inplace": True, "consume": True},
    ),
    "rope_and_cache": OpSpec(
        ropelab.rope_and_cache, normed_into_cache, cached, written=CACHES + OUTS, fixed=CACHES + OUTS,
        roundings=lambda call: (call["q_weight"].numel() // 2 + 10, 1), bits=False,
    ),
    "rope_and_cache, q apart": OpSpec(
        ropelab.rope_and_cache, apart_into_cache, cached, written=(*CACHES, "q_out", "q_nope_out"), options=SLICE,
        fixed=(*CACHES, "q_out", "q_nope_out"),
    ),
    "rope_and_cache, 8-bit floats": OpSpec(
        ropelab.rope_and_cache, scaled_into_cache, cached, written=(*CACHES, "q_out"), fixed=(*CACHES, "q_out"),
        roundings=lambda call: (8, 1),
    ),
    "rope_and_cache, made scales": OpSpec(
        ropelab.rope_and_cache, making_scales, roundings=None, fixed=(*CACHES, "q_out"),
        written=(*CACHES, "q_out", "q_scale_out", "k_scale_cache", "v_scale_cache"),
    ),
    "rotate_cached_keys": OpSpec(
        ropelab.rotate_cached_keys, of_cached_keys, recached, written=("key_cache",), options=SLICE,
        fixed=("key_cache",),
    ),
    "rotate_cached_keys, 8-bit floats": OpSpec(
        ropelab.rotate_cached_keys, of_cached_8_bits, roundings=None, written=("key_cache", "k_scale_cache"),
        fixed=("key_cache",),
    ),
    "mla_rope_and_cache": OpSpec(
        ropelab.mla_rope_and_cache, of_latent_cache, latent_cached, written=("kv_cache", "q_out", "k_out"),
        fixed=("kv_cache", "q_out", "k_out"),
    ),
    "rope_and_quantize": OpSpec(
        ropelab.rope_and_quantize, of_quantized, roundings=None, written=("out", "scales"), options={"block_dim": 4},
        fixed=("out",), any_size=False,
    ),
    "rope_and_quantize_indexer": OpSpec(
        ropelab.rope_and_quantize_indexer, of_indexer, roundings=None, written=("out", "weights_out"), fixed=("out",),
        any_size=False,
    ),
    "rope_and_block_scaled_cache": OpSpec(
        ropelab.rope_and_block_scaled_cache, of_block_scaled_cache, roundings=None, written=("kv_cache", "q_out"),
        options={"block_size": 8, "block_dim": 4}, fixed=("kv_cache", "q_out"), bits=False, any_size=False,
    ),
    "qkv_rope": OpSpec(
        ropelab.qkv_rope, of_product, projected, leaves=("x", "weight", "bias"), roundings=of_sum, bits=False
    ),
    "qkv_rope, a norm": OpSpec(
        ropelab.qkv_rope, of_normed_product, projected, leaves=("x", "weight", "bias", "q_weight", "k_weight"),
        roundings=None, once=True, bits=False,
    ),
    "qkv_rope, three weights": OpSpec(ropelab.qkv_rope, of_three_products, projected, roundings=of_sum, bits=False),
    "qkv_rope_and_cache": OpSpec(
        ropelab.qkv_rope_and_cache, of_product_into_cache, projected_into_cache, written=CACHES, roundings=of_sum,
        fixed=CACHES, bits=False,
    ),
    "qkv_rope_and_cache, results": OpSpec(
        ropelab.qkv_rope_and_cache, of_product_and_results, projected_into_cache, written=CACHES + OUTS,
        roundings=of_sum, fixed=CACHES + OUTS, bits=False,
    ),
}  # fmt: skip
WHERE = ("positions", "offsets", "start", "rows", "each", "axes", "frequencies")
FORMS = [
    ("split_half", "bshd", torch.float32, {}),
    ("interleaved", "sbhd", torch.float16, {"batch": 1, "tokens": 1, "pairs": 3}),
    ("split_half", "bhsd", torch.float64, {"heads": 7, "pairs": 5}),
    ("interleaved", "thd", torch.float32, {"heads": 6, "kv_heads": 3, "pairs": 8, "rest": 16}),
    ("split_half", "sbhd", torch.bfloat16, {"heads": 1, "kv_heads": 5, "pairs": 1, "rest": 28}),
    ("interleaved", "bshd", torch.bfloat16, {"tokens": 9, "rest": 4}),
    ("split_half", "thd", torch.float16, {"batch": 1, "tokens": 17, "heads": 2, "pairs": 12}),
]
"""Layouts, orders of axes, dtypes, and sizes that fill the programs of a kernel or do not."""
DIFFERENTIABLE = [name for name, spec in OPERATORS.items() if spec.leaves]
WRITING = [name for name, spec in OPERATORS.items() if spec.written]
CASES = [(name, where) for name, spec in OPERATORS.items() for where in spec.where]


# ------------------------------------------------------------------------------------------------------------ calls


def arguments(name: str, where: str = "positions", **sizes: Any) -> Call:
    """The arguments of a valid call of an operator.

    Args:
        where: one of `OpSpec.where`. Positions have either sign, and some tokens have none.
        sizes: see `Sizes`. An operator without a ``seq_format`` takes packed tokens.
    """
    spec = OPERATORS[name]
    if "seq_format" not in spec.parameters or spec.function is ropelab.qkv_rope_and_cache:
        sizes["seq_format"] = "thd"
    if not spec.any_size:
        sizes = {name: x for name, x in sizes.items() if name not in ("pairs", "rest")}
    s = Sizes(**sizes)
    call = spec.tensors(s) | spec.options | _angles(where, spec, s)
    if "rotary_slice" in call:
        call["rotary_slice"] = (s.first, s.first + s.turning)
    if "seq_format" in spec.parameters:
        call["seq_format"] = s.seq_format
    if "deltas" in spec.parameters:
        call["deltas"] = call.pop("positions", -5)
        call.pop("offsets", None)
    return call


def call_of(
    name: str, where: str, layout: str = "split_half", seq_format: str = "bshd", dtype: torch.dtype = torch.float32,
    sizes: Call | None = None, **more: Any,
) -> Call:  # fmt: skip
    """`arguments` in one of `FORMS`, and with a way to say where that the operator has."""
    spec = OPERATORS[name]
    if seq_format == "bhsd" and spec.function is ropelab.qkv_rope:
        seq_format = "bshd"
    where = where if where in spec.where else "positions"
    call = arguments(name, where, seq_format=seq_format, dtype=dtype, **sizes or {}, **more)
    return call | ({"layout": layout} if "layout" in spec.parameters else {})


def _angles(where: str, spec: OpSpec, s: Sizes) -> Call:
    shape = {"thd": (s.batch * s.tokens,), "sbhd": (s.tokens,), "bhsd": (1, s.tokens)}.get(
        s.seq_format, (s.batch, s.tokens)
    )  # one row of positions serves all sequences, with or without an axis for them
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    columns = s.turning if spec.full_width and where not in ("axes", "frequencies") else s.pairs
    found: Call = {"cos": s.draw(ROWS, columns, dtype=wide), "sin": s.draw(ROWS, columns, dtype=wide)}
    positions = torch.randint(1 - ROWS, ROWS, (2, *shape), device=s.device)
    positions[..., 1:2] = NO_POSITION
    positions = positions if s.dtype.itemsize > 2 else positions.int()
    match where:
        case "positions":
            found["positions"] = positions[0]
        case "frequencies":
            frequencies = ropelab.rotary_frequencies(2 * columns, device=s.device)
            found = {"frequencies": frequencies, "positions": positions[0]}
        case "axes":
            positions[1, ..., :1] = NO_POSITION  # of the first token, along the second axis
            found |= {"positions": positions, "axes": ((0, 1) * columns)[:columns]}
        case "offsets":
            found["offsets"] = torch.tensor([7, NO_POSITION], device=s.device)[
                : 1 if s.seq_format == "thd" else s.batch
            ]
        case "start":
            found["offsets"] = 1 - ROWS
        case "each":  # of the sequences has tables of its own, or all share those of one
            each = 1 if s.seq_format in ("thd", "sbhd") else s.batch
            found |= {name: s.draw(each, ROWS, columns, dtype=wide) for name in ("cos", "sin")}
            found["positions"] = positions[0]
    return found


def tensors(call: Call) -> dict[str, torch.Tensor]:
    """The tensors of a call by argument, those of a tuple one by one."""
    parts = {
        f"{name}[{i}]" if isinstance(value, tuple) else name: x
        for name, value in call.items()
        for i, x in enumerate(value if isinstance(value, tuple) else (value,))
    }
    return {name: x for name, x in parts.items() if isinstance(x, torch.Tensor)}


def copied(call: Call) -> Call:
    """The call with tensors of its own."""
    return {
        name: tuple(map(torch.clone, x)) if isinstance(x, tuple) and isinstance(x[0], torch.Tensor)
        else x.clone() if isinstance(x, torch.Tensor) else x
        for name, x in call.items()
    }  # fmt: skip


def results(name: str, call: Call, function: Callable | None = None) -> list[torch.Tensor]:
    """The tensors that a call returns, and afterwards the arguments that it writes.

    Args:
        function: in place of the operator's own.
    """
    found = (function or OPERATORS[name].function)(**call)
    return [*(found if isinstance(found, tuple) else (found,)), *(call[x] for x in OPERATORS[name].written)]


def defined(name: str, call: Call) -> list[torch.Tensor]:
    """What `results` would be in exact arithmetic, in float64."""
    if "frequencies" in call:
        half = len(call["frequencies"])
        cos, sin = ropelab.rotary_table(ROWS, 2 * half, dtype=torch.float64, device=call["frequencies"].device)
        call = call | {"cos": cos, "sin": sin}
    found, written = OPERATORS[name].definition(call)
    return [*found, *(written[x] for x in OPERATORS[name].written)]


def excess(name: str, call: Call, found: list[torch.Tensor]) -> float:
    """The largest error of results of a call, in units of its bound.

    With M, the definition for the magnitudes of all numbers, n roundings move an element by ((1 + u)^n - 1) M. Cosines
    and sines that the kernel computes in float32 err by another unit in the last place each.
    """
    spec, sizes = OPERATORS[name], {key: _size(x) for key, x in call.items()}
    dtype = next(x.dtype for x in tensors(call).values() if x.is_floating_point() and x.itemsize > 1)
    wide, (arithmetic, stores) = torch.promote_types(dtype, torch.float32), spec.roundings(call)
    if "frequencies" in call:
        ones = torch.ones(ROWS, len(sizes.pop("frequencies")), device=found[0].device)
        sizes |= {"cos": ones, "sin": ones}
        wide, arithmetic = torch.float32, arithmetic + 2
    both = (defined(name, sizes | {"sin": sign * sizes["sin"]}) for sign in (1, -1))
    largest = 0.0
    for y, truth, size in zip(found, defined(name, call), map(torch.maximum, *both), strict=True):
        out = torch.finfo(y.dtype)
        unit = out.eps if y.dtype == torch.bfloat16 and INTERPRETED else out.eps / 2  # the interpreter truncates
        bound = ((1 + torch.finfo(wide).eps / 2) ** arithmetic - 1 + 2.0**-48) * size
        for _ in range(stores - 1):
            bound = bound + torch.finfo(dtype).eps / 2 * (size + bound)
        bound = bound + unit * (truth.abs() + bound) + out.tiny * out.eps
        assert y.shape == truth.shape
        if y.numel():
            largest = max(largest, float(((y.double() - truth).abs() / bound).max()))
    return largest


def _size(x: Any) -> Any:
    if isinstance(x, tuple) and isinstance(x[0], torch.Tensor):
        return tuple(map(torch.abs, x))
    return x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def recorded(name: str, call: Call, function: Callable | None = None) -> list[torch.Tensor]:
    """`results`, and the gradients in all leaves for cotangents that are the same every time."""
    leaves = [call[x].requires_grad_() for x in OPERATORS[name].leaves if x in call]
    found = results(name, call, function)
    if not leaves:
        return found
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in found]
    return [*found, *torch.autograd.grad(found, leaves, weights)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all tensors agree bit for bit, apart from the sign of zeros and the payload of NaN."""
    pairs = [(x.float(), y.float()) if x.itemsize == 1 else (x, y) for x, y in zip(found, expected, strict=True)]
    return all(x.dtype == y.dtype and torch.equal(x.nan_to_num(12345.0), y.nan_to_num(12345.0)) for x, y in pairs)
