"""Invalid calls of the adapters, generated: each argument in turn becomes a value that cannot be meant.

An adapter must refuse such a call in the words of the other package, before it writes. `ACCEPTED` lists what a call may
hold besides: arguments that may be None or of any length, and values that the other package ignores.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ropelab.interop import deepspeed, flashinfer, huggingface, megatron, sglang, transformer_engine, vllm
from tests.hostile_calls import ANGLES, CU, Q, TARGETS
from tests.test_interop_flashinfer import append_call
from tests.test_interop_vllm import latent_call, norm_call


class Adapter(NamedTuple):
    """An adapter, and a function that makes the arguments of a valid call."""

    function: Callable
    arguments: Callable[[], dict[str, Any]]


def of_target(function: Callable, name: str, **more: Any) -> Adapter:
    """The adapter with the valid call of `tests.hostile_calls`."""
    return Adapter(function, lambda: copied(TARGETS[name].arguments | more))


def copied(value: Any) -> Any:
    """The value with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copied(x) for name, x in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (tuple, list)) else value


def append(**options: Any) -> Adapter:
    """FlashInfer's function with tensors for its results that are not neighbours."""

    def arguments():
        call = append_call(**options)
        outs = {f"{name}_out": torch.empty(call[name].shape).to(call["quantize_dtype"]) for name in ("q_rope", "q_nope")}
        return call | outs | {"enable_pdl": False}

    return Adapter(flashinfer.rope_quantize_fp8_append_paged_kv_cache, arguments)


def mla(**more: Any) -> Callable[[], dict[str, Any]]:
    """The arguments of Megatron-LM's functions for queries of latent attention, with packed tokens."""
    cos, sin = (torch.randn(8, 1, 1, 8) for _ in range(2))
    return lambda: {
        "t": Q.flatten(0, 1).clone(), "cos": cos, "sin": sin, "emb_dim": 8, "cu_seqlens_q": CU, "cp_rank": 0,
        "cp_size": 1, "rotary_interleaved": False,
    } | more  # fmt: skip


CONFIG = SimpleNamespace(rotary_interleaved=False, multi_latent_attention=False, apply_rope_fusion=True)
GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
PACKED = {"t": Q.flatten(0, 1), "cu_seqlens": CU, "freqs": ANGLES, "mscale": 1.5, "inverse": False}
ADAPTERS = {
    "flashinfer, GQA": append(nope_dim=8),
    "flashinfer, HND": append(nope_dim=8, kv_layout="HND"),
    "flashinfer, MLA": append(nope_dim=40, latent=True),
    "flashinfer.slot_mapping": Adapter(
        flashinfer.slot_mapping,
        lambda: {
            name: x for name, x in append_call().items()
            if name in ("kv_indices", "kv_indptr", "batch_indices", "positions", "page_size")
        },  # fmt: skip
    ),
    "vllm.fused_qknorm_rope_cache": Adapter(vllm.fused_qknorm_rope_cache, lambda: norm_call(kind="fp8")),
    "vllm.fused_qknorm_rope_cache, auto": Adapter(vllm.fused_qknorm_rope_cache, norm_call),
    "vllm.concat_and_cache_mla_rope_fused": Adapter(
        vllm.concat_and_cache_mla_rope_fused, lambda: latent_call(kind="fp8")
    ),
    "megatron.fused_mla_rope_inplace": Adapter(
        megatron.fused_mla_rope_inplace, mla(nope_dim=8, inverse=False, remove_interleaving=False)
    ),
    "megatron.fused_mla_rope_out_of_place": Adapter(
        megatron.fused_mla_rope_out_of_place,
        mla(nope_dim=8, position_ids=torch.arange(8), inverse=False, remove_interleaving=False),
    ),
    "megatron.fused_apply_mla_rope_for_q": Adapter(megatron.fused_apply_mla_rope_for_q, mla(qk_head_dim=8)),
    "megatron.fused_mla_rope_kv_split": of_target(
        megatron.fused_mla_rope_kv_split, "megatron.fused_mla_rope_kv_split", cp_rank=0, cp_size=1
    ),
    "megatron.fused_apply_rotary_pos_emb": of_target(
        megatron.fused_apply_rotary_pos_emb, "megatron.fused_apply_rotary_pos_emb", transpose_output_memory=False
    ),
    "megatron.fused_apply_rotary_pos_emb_thd": Adapter(
        megatron.fused_apply_rotary_pos_emb_thd,
        lambda: copied(PACKED | {"cp_size": 1, "cp_rank": 0, "interleaved": False}),
    ),
    "megatron.apply_rotary_pos_emb": Adapter(
        megatron.apply_rotary_pos_emb,
        lambda: copied(PACKED) | {
            "config": CONFIG, "cp_group": GROUP, "mla_rotary_interleaved": False,
            "mla_output_remove_interleaving": False, "max_seqlen": 8,
        },  # fmt: skip
    ),
    "deepspeed.apply_rotary_pos_emb": of_target(deepspeed.apply_rotary_pos_emb, "deepspeed.apply_rotary_pos_emb"),
    "deepspeed.fused_rope_forward": of_target(deepspeed.fused_rope_forward, "deepspeed.fused_rope_forward"),
    "huggingface.apply_rotary_pos_emb": of_target(huggingface.apply_rotary_pos_emb, "huggingface.apply_rotary_pos_emb"),
    "transformer_engine.apply_rotary_pos_emb": of_target(
        transformer_engine.apply_rotary_pos_emb, "transformer_engine.apply_rotary_pos_emb"
    ),
    "transformer_engine.apply_rotary_pos_emb, thd": of_target(
        transformer_engine.apply_rotary_pos_emb, "transformer_engine.apply_rotary_pos_emb, thd"
    ),
    "transformer_engine.apply_fused_qkv_rotary_pos_emb": of_target(
        transformer_engine.apply_fused_qkv_rotary_pos_emb, "transformer_engine.apply_fused_qkv_rotary_pos_emb"
    ),
    **{
        f"sglang.{name}": of_target(getattr(sglang, name), f"sglang.{name}")
        for name in ("rotary_embedding_cos_sin", "apply_rope_qk_inplace", "apply_rope_with_cos_sin_cache_inplace")
    },
}  # fmt: skip


def of_tensor(x: torch.Tensor) -> dict[str, Any]:
    integers = not (x.is_floating_point() or x.is_complex())
    wrong = {
        "None": None, "a list": [1.0, 2.0], "a number": 2.5, "a string": "tensor", "of no axis": x.flatten()[0],
        "of one more axis": x[None], "of two more axes": x[None, None], "shorter": x[:-1], "empty": x[:0],
        "longer": torch.cat((x, x[-1:])) if x.ndim else x[None, None], "on meta": x.to("meta"), "bool": x.bool(),
        "sparse": x.to_sparse() if x.is_floating_point() and x.itemsize > 1 else None,
        "of another dtype": x.float() if integers else x.long(),
    }  # fmt: skip
    if x.ndim > 1:
        wrong |= {"narrower": x[..., :-1], "without features": x[..., :0]}
    if integers and x.dtype != torch.uint8:
        wrong |= {"negative": torch.full_like(x, -5), "far beyond": torch.full_like(x, 2**31 - 1), "short": x.short()}
    return wrong


def hostile(value: Any) -> dict[str, Any]:
    """What it is -> a value of a wrong type, shape, dtype, device or range in the place of a valid value."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, bool):
        return {"None": None, "a string": "False", "an integer": 1, "a list": [True]}
    if isinstance(value, int):
        return {"None": None, "a string": "3", "a fraction": 2.5, "a bool": True, "negative": -5, "a list": [value],
                "a tensor": torch.tensor(value)}  # fmt: skip
    if isinstance(value, float):
        return {"None": None, "a string": "2", "NaN": float("nan"), "a bool": True, "a list": [value],
                "infinite": float("inf"), "a tensor": torch.tensor(value)}  # fmt: skip
    if isinstance(value, (tuple, list)):
        wrong = {"None": None, "empty": (), "a string": "34", "shorter": value[:-1], "a dict": {}}
        for i, part in enumerate(value):
            wrong |= {f"with {name} at {i}": (*value[:i], x, *value[i + 1 :]) for name, x in hostile(part).items()}
        return wrong
    if isinstance(value, (str, torch.dtype)):
        return {"None": None, "a number": 3, "another": "nonsense", "a list": [value], "a dtype": torch.int32}
    return {"None": None, "a string": "nonsense", "a number": 3, "of nothing": SimpleNamespace()}


def calls(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(argument, what it is, the arguments) of the hostile calls of an adapter."""
    function, arguments = ADAPTERS[name]
    for argument, value in arguments().items():
        for what in hostile(value):
            call = arguments()
            yield argument, what, call | {argument: hostile(call[argument])[what]}


def bits(call: dict[str, Any]) -> list[torch.Tensor]:
    """Copies of the tensors of a call, as bytes."""
    found = []
    for value in call.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta:
                found.append(x.detach().clone().contiguous().view(-1).view(torch.uint8))
    return found
