"""Hand rotations of other packages to `ropelab.conformance.verify`, with the claims of each.

The functions below load an implementation, and call it with the order of arguments and the width of tables that it
expects. They raise NotImplementedError for a call that the implementation does not claim to support. A law that needs
this call is then not applicable.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ropelab import apply_rope, rotary_frequencies
from ropelab.bench import packages, replaced
from ropelab.bench.peers import flashinfer, torch_library
from ropelab.kernels import INTERPRETED
from ropelab.layout.pairing import LAYOUTS

Pair = tuple[torch.Tensor, torch.Tensor]


# ----------------------------------------------------------------------------------------------- published formulas


def complex_numbers(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Pair:
    """The first Llama code's rotation: a product of complex numbers, ``x [B, S, H, D]``, ``freqs_cis [S, D/2]``."""

    def turned(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).type_as(x)

    return turned(xq), turned(xk)


def nanochat(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 2) -> Pair:
    """nanochat's formula for ``x [B, S, H, D]``, which turns by minus the angle on purpose, and a column per pair."""
    cos, sin = (table.unsqueeze(unsqueeze_dim) for table in (cos, sin))

    def turned(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * -sin + x2 * cos), dim=-1)

    return turned(q), turned(k)


def table_free(x: torch.Tensor, positions: torch.Tensor, *, layout: str) -> torch.Tensor:
    """ropelab's rotation without tables."""
    frequencies = rotary_frequencies(x.shape[-1], device=x.device)
    return apply_rope(x, frequencies=frequencies, layout=layout, positions=positions)


# --------------------------------------------------------------------------------------------------------- packages


def transformers(q, k, cos, sin, unsqueeze_dim: int = 1, *, model: str) -> Pair:
    """Hugging Face's function for a model."""
    return _transformers(model).apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def transformers_gptj(q, k, cos, sin, unsqueeze_dim: int = 2) -> Pair:
    """Hugging Face's function for GPT-J: one tensor ``[B, S, H, D]``, tables with a column per pair, sines first."""
    module = _transformers("gptj")
    return tuple(module.apply_rotary_pos_emb(x, sin, cos) for x in (q, k))


def _transformers(model: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def torchembed(q, k, cos, sin, unsqueeze_dim: int = 1, *, version: str) -> Pair:
    """The kernel of torchembed for halves, which DeepSpeed#8052 calls: ``q, k [B, H, S, D]``."""
    return _torchembed(version).fused_rope_forward(q, k, *map(_shared, (cos, sin)))


def torchembed_0_3_2_pairs(q, k, cos, sin, unsqueeze_dim: int = 2) -> Pair:
    """The kernel of torchembed 0.3.2 for adjacent pairs: one tensor ``[B, S, H, D]``, tables with a column per pair.

    The tables are contiguous, because the backward reads the negated sines with the strides of the cosines. The strides
    differ if a table is a slice of a wider table.
    """
    cos, sin = (_shared(table)[:, ::2].contiguous() for table in (cos, sin))
    return tuple(_torchembed("0.3.2").fused_rope_bshd_apply(x, cos, sin) for x in (q, k))


def _torchembed(version: str) -> ModuleType:
    return packages.load_file("torchembed", version, "torchembed/_triton.py")


def _shared(table: torch.Tensor) -> torch.Tensor:
    """The table ``[S, R]`` that all sequences of ``[B, S, R]`` share: torchembed has no argument for positions."""
    if len(table) == 0 or not torch.equal(table, table[:1].expand_as(table)):
        raise NotImplementedError("torchembed has one table for all sequences of a batch")
    return table[0]


def liger(q, k, cos, sin, unsqueeze_dim: int = 1) -> Pair:
    """The kernel of Liger-Kernel: ``q, k [B, H, S, D]``."""
    return _liger().LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)


def _liger() -> ModuleType:
    version, _ = packages.locate("liger-kernel")
    return packages.load_file("liger-kernel", version, "liger_kernel/ops/rope.py")


def flash_attn(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
) -> torch.Tensor:
    """flash-attn's public function and its Triton kernel."""
    return _flash_attn().apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


@cache
def _flash_attn() -> ModuleType:
    """The files with the function and the kernel, without the package around them, which loads a CUDA extension."""
    version, _ = packages.locate("flash-attn")
    kernels = packages.load_file("flash-attn", version, "flash_attn/ops/triton/rotary.py")
    if not torch.cuda.is_available():
        kernels.torch = _TorchWithoutGPU()
    with replaced.entries(sys.modules, {"flash_attn.ops.triton.rotary": kernels}):
        if importlib.util.find_spec("einops") is None:  # only flash-attn's functions in plain torch use einops
            sys.modules["einops"] = SimpleNamespace(rearrange=None, repeat=None)
        layers = packages.load_file("flash-attn", version, "flash_attn/layers/rotary.py")
    sys.modules[layers.__name__] = layers  # the compiler imports the modules that it traces by name
    return layers


def flashinfer_cache(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """FlashInfer's operator in place, in the newest installed version."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError("FlashInfer rotates bfloat16 and float16")
    layout = "split_half" if is_neox else "interleaved"
    flashinfer.require_whole_vectors(head_size, cos_sin_cache.shape[-1], layout, query.itemsize)
    _flashinfer().apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)


@cache
def _flashinfer() -> ModuleType:
    version, _ = packages.locate(flashinfer.PACKAGE)
    module = flashinfer.module(version)
    sys.modules.update(flashinfer.imports(version))  # the compiler imports the modules that it traces by name
    return module


def vllm_operator(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """vLLM's operator in place, in the newest installed version."""
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError("vLLM rotates float32, bfloat16 and float16")
    _vllm()(positions, query, key, head_size, cos_sin_cache, is_neox)


@cache
def _vllm() -> Callable[..., None]:
    if not torch.cuda.is_available():
        raise packages.NotInstalled("vLLM's CUDA kernel needs a GPU")
    return torch_library.operators("vllm").rotary_embedding


class _TorchWithoutGPU:
    """``torch`` for a launcher that selects the GPU of its tensors. Interpreted kernels have no GPU."""

    cuda = SimpleNamespace(device=lambda index: nullcontext())
    library = SimpleNamespace(wrap_triton=lambda kernel: kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# --------------------------------------------------------------------------------------------------------- the list


def nothing() -> None:
    """Load nothing: the code of the contender is in this repository."""


@dataclass(frozen=True)
class Contender:
    """An implementation and what it claims.

    Attributes:
        name: the name in tables.
        function, convention, options: arguments of ``verify``. ``options`` declares the layout and other properties.
        load: a function that raises ImportError if the implementation is not installed.
        triton: whether the kernel needs a GPU or Triton's interpreter.
        not_interpreted: the laws that say nothing about the kernel when Triton interprets it.
        not_claimed: the laws that the implementation does not claim to keep.
    """

    name: str
    function: Callable[..., Any]
    convention: str
    options: Mapping[str, Any]
    load: Callable[[], object] = nothing
    triton: bool = False
    not_interpreted: tuple[str, ...] = ("compile",)
    not_claimed: tuple[str, ...] = ()

    def missing(self) -> str:
        """The reason why the implementation cannot run here; "" if it can."""
        if self.triton and not (torch.cuda.is_available() or INTERPRETED):
            return "its Triton kernel needs a GPU or TRITON_INTERPRET=1"
        try:
            self.load()
        except ImportError as error:
            return str(error)
        return ""


def _ours() -> Iterator[Contender]:
    for name, options in {
        "split-half": {"layout": "split_half"},
        "interleaved": {"layout": "interleaved"},
        "interleaved to split-half": {"layout": "interleaved", "out_layout": "split_half"},
        "sbhd": {"seq_format": "sbhd"},
        "bhsd": {"seq_format": "bhsd"},
        "in place": {"inplace": True},
    }.items():
        yield Contender(f"ropelab, {name}", apply_rope, "ropelab", options)
    for layout in LAYOUTS:
        function = partial(table_free, layout=layout)
        yield Contender(f"ropelab, table-free, {layout}", function, "plain", {"layout": layout})


def _hugging_face(model: str, function: Callable[..., Pair] | None = None, **options) -> Contender:
    name, function = model.lower(), function or partial(transformers, model=model.lower())
    return Contender(f"transformers, {model}", function, "huggingface", options, partial(_transformers, name))


def _kernel(name: str, function: Callable, convention: str, load: Callable[[], object], **options) -> Contender:
    """A kernel, whose backward returns None for cos and sin."""
    return Contender(name, function, convention, options, load, triton=True, not_claimed=("table_gradients",))


_NO_BFLOAT16 = ("compile", "rounding")  # the interpreter multiplies the bits of bfloat16 as integers


CONTENDERS: tuple[Contender, ...] = (
    *_ours(),
    _hugging_face("Llama"),
    _hugging_face("GPTJ", transformers_gptj, layout="interleaved", seq_format="bshd", columns="pair"),
    _hugging_face("GLM", layout="interleaved", columns="split_half", rotary_dim=8),
    _hugging_face("Cohere", layout="interleaved", maths="wide"),
    Contender("complex product (Llama)", complex_numbers, "complex", {"layout": "interleaved"}),
    Contender("nanochat, sign declared", nanochat, "huggingface",
              {"sign": "reversed", "seq_format": "bshd", "columns": "pair"}),
    *(
        _kernel(f"torchembed {version}", partial(torchembed, version=version), "huggingface",
                partial(_torchembed, version), maths="wide")
        for version in ("0.3.0", "0.3.2")
    ),
    _kernel("torchembed 0.3.2, interleaved", torchembed_0_3_2_pairs, "huggingface", partial(_torchembed, "0.3.2"),
            maths="wide", layout="interleaved", seq_format="bshd", columns="repeated"),
    replace(_kernel("Liger", liger, "huggingface", _liger, columns="repeated"), not_interpreted=_NO_BFLOAT16),
    _kernel("flash-attn, split-half", flash_attn, "flash_attn", _flash_attn),
    _kernel("flash-attn, interleaved", flash_attn, "flash_attn", _flash_attn, layout="interleaved"),
    _kernel("FlashInfer, split-half", flashinfer_cache, "vllm", _flashinfer, maths="wide", head_dim=64),
    _kernel("FlashInfer, interleaved", flashinfer_cache, "vllm", _flashinfer, maths="wide", head_dim=64,
            layout="interleaved"),
    _kernel("vLLM, split-half", vllm_operator, "vllm", _vllm),
    _kernel("vLLM, interleaved", vllm_operator, "vllm", _vllm, layout="interleaved"),
)  # fmt: skip
"""All contenders, ropelab's first."""
