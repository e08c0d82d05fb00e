"""Measure rotations that store 8-bit floats with block scales: DeepSeek-V4's operators, ours and vLLM's."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.bench import packages, replaced, same_places, timing
from ropelab.bench.cache_operations import OURS, VLLM
from ropelab.bench.operation import PUBLISHED, Contender, Operation, table
from ropelab.bench.peers import torch_library, vllm_triton
from ropelab.bench.workloads import Workload
from ropelab.kernels.block_scales import Page
from ropelab.kernels.block_scales_torch import rows_of_cache

TOKENS = (1, 8, 64, 512, 4096, 8192)
HEADS = (64, 128)
ROTARY_DIM = 64
POSITIONS = 8192
"""Rows of the tables."""
BLOCK_SIZE = 64
"""The tokens of a block of the cache, as in vLLM."""
PAGE_ALIGN = 576
"""vLLM rounds the bytes of a block of the cache up to a multiple of this number."""
EPS = 1e-6
IN_TURN = "vLLM, launched in turn"
"""vLLM's Triton operator, but it starts when the kernel before it has ended.

vLLM launches this operator so that its programs start earlier and wait (programmatic dependent launch). Among its own
calls, one after the other, this hides its start; every other contender starts in turn.
"""
MOST_CHECKED = 256
"""So many tokens of a call are compared with float64."""

Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], Sequence[torch.Tensor]]
"""A function of the tensors of a call that returns its results."""


@dataclass(frozen=True)
class BlockScales(Operation):
    """An operator for ``tokens`` tokens and ``heads`` heads of bfloat16, whose last features rotate."""

    tokens: int
    heads: int

    of_contenders = PUBLISHED
    scaled = True
    name: ClassVar[str]
    head_dim: ClassVar[int] = 512

    @property
    def columns(self):
        return {
            "operation": self.name, "tokens": self.tokens, "heads": self.heads, "head_dim": self.head_dim,
            "rotary_dim": ROTARY_DIM, "bytes": self.bytes,
        }  # fmt: skip

    @property
    def description(self):
        return f"{self.name}, {self.heads}, {self.tokens}"

    @property
    def work(self) -> Workload:
        """q as a workload, which knows how many sets of tensors exceed a cache."""
        return Workload(self.name, 1, self.tokens, self.heads, 0, self.head_dim, ROTARY_DIM)

    @property
    def numel(self) -> int:
        """The features of all heads."""
        return self.tokens * self.heads * self.head_dim

    @property
    def rotary_slice(self) -> tuple[int, int]:
        return self.head_dim - ROTARY_DIM, self.head_dim

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The bytes that must move, without the tables."""

    def sets(self, device):
        return self.tensors(self.work.cold_count(timing.cache_bytes()), device)

    def contenders(self, sets, device):
        found: dict[str, Contender] = {OURS: Contender(self.ours)}
        try:
            runs, about = self.vllm()
            return found | {name: Contender(run, about) for name, run in runs.items()}
        except packages.NotInstalled as error:
            return found | {VLLM: Contender(f"not run: {error}")}

    def to_copy(self, call, step=""):
        return (call["x"],)

    def check(self, run, call, step=""):
        return self.agreement(call, run(call))

    def tensors(self, count: int, device: torch.device | str) -> list[Tensors]:
        """The tensors of ``count`` calls."""
        draw = torch.Generator(device).manual_seed(0)
        table = torch.cat(ropelab.rotary_table(POSITIONS, ROTARY_DIM, device=device), -1)
        found = []
        for _ in range(count):
            shape = self.tokens, self.heads, self.head_dim
            x = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
            positions = torch.randint(POSITIONS, (self.tokens,), generator=draw, device=device)
            found.append({"x": x, "positions": positions, "table": table})
        return found

    def where(self, call: Tensors) -> dict[str, object]:
        """The arguments of our functions that say where the tokens are."""
        cos, sin = call["table"].chunk(2, -1)
        return {"cos": cos, "sin": sin, "positions": call["positions"], "rotary_slice": self.rotary_slice}

    @abstractmethod
    def ours(self, call: Tensors) -> Sequence[torch.Tensor]:
        """Our function."""

    @abstractmethod
    def vllm(self) -> tuple[dict[str, Run], Mapping[str, str]]:
        """The contenders that are vLLM's operator, and its version and the hash of its code.

        Raises:
            NotInstalled: vLLM is not installed.
        """

    @abstractmethod
    def agreement(self, call: Tensors, results: Sequence[torch.Tensor]) -> str:
        """``"ok"``, or what is wrong about results."""

    def rotated(self, x: torch.Tensor, call: Tensors, **options) -> torch.Tensor:
        """The first tokens of ``x``, rotated in float64."""
        where = self.where(call) | {"positions": call["positions"][: len(x)]}
        return reference.rotate(x, layout="interleaved", seq_format="thd", **where, **options)


def disagreement(values: torch.Tensor, scales: torch.Tensor, right: torch.Tensor, rounded: bool) -> str:
    """``"ok"`` if 8-bit floats and their scales equal ``right`` up to the roundings.

    A scale is the least power of two that makes the largest number of its block at most 448, where a rounding to
    bfloat16 or float32 may move this number across the limit. A value is off by half a unit in its last place: 2^-4 of
    itself or 2^-10 of the scale; and by 2^-8 of itself if it was rounded to bfloat16 before.

    Args:
        values: float8_e4m3fn ``[..., D]``.
        scales: float32 ``[..., blocks]``.
        right: float64, as ``values``.
        rounded: whether the values were rounded to bfloat16.
    """
    unit = 2.0**-8 if rounded else 2.0**-20
    blocks = right.unflatten(-1, (scales.shape[-1], -1))
    amax, scale = blocks.abs().amax(-1), scales.double()
    if not bool(((amax <= 448 * scale * (1 + unit)) & (amax >= 224 * scale * (1 - unit))).all()):
        return "wrong: a scale is not the least power of two"
    found = values.double().view(blocks.shape) * scale[..., None]
    bound = blocks.abs() * (2.0**-4 + unit) * (1 + unit) + scale[..., None] * 2.0**-10
    worst = ((found - blocks).abs() / bound).max().item()
    return "ok" if worst <= 1 else f"wrong: a value is off by {worst:.3g} times the roundings"


@dataclass(frozen=True)
class Output(BlockScales):
    """The inverse rotation of the output of attention, and its quantization in blocks of 128 features.

    Attributes:
        packed: the scales are four exponents in an int32 instead of float32.
    """

    packed: bool = False

    name = "inverse rotation, quantization"

    @property
    def columns(self):
        return super().columns | {"scales": "int32" if self.packed else "float32"}

    @property
    def bytes(self):
        return 3 * self.numel + self.numel // 128 * (1 if self.packed else 4)

    @property
    def groups(self) -> int:
        """The groups of the output projection: a group has eight heads."""
        return self.heads // 8

    def places(self, call, step=""):
        return [same_places.to_new(call["x"], itemsize=1)]

    def ours(self, call):
        dtype = torch.int32 if self.packed else torch.float32
        return ropelab.rope_and_quantize(
            call["x"], groups=self.groups, scale_dtype=dtype, inverse=True, **self.where(call)
        )

    def vllm(self):
        operators, (nope_dim, _) = vllm_triton.operators(), self.rotary_slice
        numbers = self.groups, self.heads // self.groups, nope_dim, ROTARY_DIM, 128, self.packed

        def run(call):
            return operators.inv_rope_fp8_quant(call["x"], call["positions"], call["table"], *numbers)

        def in_turn(call):
            with replaced.attributes(operators.platform, is_arch_support_pdl=lambda: False):
                return run(call)

        return {VLLM: run, IN_TURN: in_turn}, operators.about

    def agreement(self, call, results):
        values, scales = (x[:MOST_CHECKED] for x in results)
        if self.packed:
            exponents = scales.contiguous().view(torch.uint8).int()
            scales = (exponents << 23).view(torch.float32)
        right = self.rotated(call["x"][:MOST_CHECKED], call, inverse=True)
        return disagreement(values.contiguous(), scales, right.view(values.shape), rounded=False)


@dataclass(frozen=True)
class Indexer(BlockScales):
    """The rotation of the queries of the indexer, and their quantization with a scale for each head."""

    heads: int = 64

    name = "indexer"
    head_dim = 128
    weight_scales = (128**-0.5, 64**-0.5)
    """The scale of the softmax and the scale of the heads."""

    @property
    def bytes(self):
        return 3 * self.numel + 6 * self.tokens * self.heads

    def tensors(self, count, device):
        found = super().tensors(count, device)
        for call in found:
            call["weights"] = call["x"][..., 0].contiguous()
        return found

    def places(self, call, step=""):
        return [same_places.to_new(call["x"], itemsize=1)]

    def ours(self, call):
        scale = self.weight_scales[0] * self.weight_scales[1]
        return ropelab.rope_and_quantize_indexer(call["x"], call["weights"], weight_scale=scale, **self.where(call))

    def vllm(self):
        operators = vllm_triton.operators()

        def run(call):
            arguments = (call[name] for name in ("positions", "x", "table", "weights"))
            return operators.indexer_q_rope_quant(*arguments, *self.weight_scales)

        return {VLLM: run}, operators.about

    def agreement(self, call, results):
        values, weights = (x[:MOST_CHECKED] for x in results)
        product = call["weights"][:MOST_CHECKED].double() * self.weight_scales[0] * self.weight_scales[1]
        scales = weights.double() / product
        exponents = scales.log2().round()
        # Two products in float32 are off by less than 2^-22.
        if not bool(((scales * 2**-exponents - 1).abs() <= 2.0**-22).all()):
            return "wrong: a weight is no power of two times the given weight"
        right = self.rotated(call["x"][:MOST_CHECKED], call)
        return disagreement(values, 2 ** exponents[..., None], right, rounded=True)


@dataclass(frozen=True)
class Input(BlockScales):
    """Norm and rotation of q, and the rotation of kv into a cache with blocks of 64 features."""

    name = "norm, rotation, cache with block scales"

    @property
    def page(self) -> Page:
        return Page(BLOCK_SIZE, self.head_dim - ROTARY_DIM, ROTARY_DIM, 64, 2)

    @property
    def bytes(self):
        row = 2 * self.head_dim + self.page.data_bytes + self.page.scale_bytes
        return 4 * self.numel + self.tokens * row

    def tensors(self, count, device):
        found = super().tensors(count, device)
        draw, pages = torch.Generator(device).manual_seed(1), -(-count * self.tokens // BLOCK_SIZE)
        page_bytes = -(-self.page.bytes // PAGE_ALIGN) * PAGE_ALIGN
        cache = torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)
        slots = torch.randperm(pages * BLOCK_SIZE, generator=draw, device=device)[: count * self.tokens]
        for call, mine in zip(found, slots.split(self.tokens), strict=True):
            kv = torch.randn(self.tokens, self.head_dim, generator=draw, device=device, dtype=torch.bfloat16)
            call |= {"kv": kv, "cache": cache, "slots": mine}
        return found

    def places(self, call, step=""):
        return [same_places.to_new(call["x"]), same_places.to_new(call["kv"], itemsize=1)]

    def ours(self, call):
        q = ropelab.rope_and_block_scaled_cache(
            call["x"], call["kv"], call["cache"], call["slots"], block_size=BLOCK_SIZE, eps=EPS, **self.where(call)
        )
        return (q,)

    def vllm(self):
        operators = torch_library.operators("vllm")

        def run(call):
            q = operators.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
                call["x"], call["kv"], call["cache"], call["slots"], call["positions"], call["table"], self.heads, EPS,
                BLOCK_SIZE,
            )  # fmt: skip
            return (q,)

        return {VLLM: run}, operators.about

    def agreement(self, call, results):
        x = call["x"][:MOST_CHECKED].double()
        right = self.rotated(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS), call)
        error = (results[0][:MOST_CHECKED].double() - right).norm(dim=-1) / right.norm(dim=-1)
        if not bool((error <= 2.0**-8).all()):  # a rounding to bfloat16, and those of float32, far below it
            return f"wrong: a head of q has relative error {error.max().item():.3g}"
        slots = call["slots"][:MOST_CHECKED]
        data, scales = (x[slots // BLOCK_SIZE, slots % BLOCK_SIZE] for x in rows_of_cache(call["cache"], self.page))
        right = self.rotated(call["kv"][:MOST_CHECKED, None], call)[:, 0]
        nope_dim = self.page.nope_dim
        tail = data[:, nope_dim:].contiguous().view(torch.bfloat16).double()
        if not bool(((tail - right[:, nope_dim:]).abs() <= 2.0**-8 * right[:, nope_dim:].abs() + 2.0**-20).all()):
            return "wrong: the rotated features of the cache"
        powers = 2.0 ** (scales[:, : self.page.scales].double() - 127)
        values = data[:, :nope_dim].contiguous().view(torch.float8_e4m3fn)
        return disagreement(values, powers, right[:, :nope_dim], rounded=True)


def cases() -> list[BlockScales]:
    """All operators, for all numbers of tokens and heads."""
    found: list[BlockScales] = [kind(tokens, heads) for kind in (Output, Input) for heads in HEADS for tokens in TOKENS]
    found += [Output(tokens, 64, packed=True) for tokens in (1, 4096)]
    return [*found, *(Indexer(tokens) for tokens in TOKENS)]


def block_scales(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the operators of `cases`.

    Columns: operation, tokens, heads, head_dim, rotary_dim, bytes (that must move), scales (the dtype of scales), and
        those of `operation.compare`. The copies copy q; the copy to the same places reads q and writes as many elements
        as the operator, of the same size.
    """
    return table([Output(1, 64)] if smoke else cases(), rounds=3 if smoke else 9, device=device)
