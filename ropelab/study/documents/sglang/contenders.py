"""The contenders of the study of SGLang#14302, as adapters for `ropelab.bench.peers`.

All rotate q and k in place, forward, on ``[B, S, H, D]`` seen as ``T = B S`` tokens. Tables have the dtype of q, as
the document's operator asks. The operator as published is in `kernel_contenders`. The packages are `PACKAGES`, and are
not run where they are not installed.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

from ropelab.bench import packages
from ropelab.bench.peers import Peer, Rotate, cos_sin_cache, flashinfer
from ropelab.bench.workloads import Workload
from ropelab.interop import sglang as interop
from ropelab.kernels import Rotation, rotate_triton
from ropelab.kernels.run import run
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile, next_power_of_2
from ropelab.layout import pairing
from ropelab.study.documents.sglang import models
from ropelab.study.documents.sglang.binding import contender, in_place, is_interleaved, token_positions, token_rows
from ropelab.study.documents.sglang.names import (
    COMPILED,
    EAGER,
    FLASH,
    FLASHINFER,
    FLASHINFER_FROM_CPU,
    FLASHINFER_NEWEST,
    OURS,
    OURS_CACHE,
    OURS_FLOAT32,
    PERSISTENT,
    SGL_KERNEL,
    VLLM,
)

FLASHINFER_THEN = "0.5.3"
"""The version of November 2025, when the document was under review."""


def _ours(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    cos, sin, interleaved = token_rows(workload, cos), token_rows(workload, sin), is_interleaved(workload)
    return in_place(lambda q, k: interop.rotary_embedding_cos_sin(cos, sin, q, k, interleaved=interleaved))


def token_tile(q_heads: int, rotary_dim: int) -> Tile:
    """The tile of a program that rotates all heads of a token with at most 512 threads, as in vLLM."""
    heads, width = next_power_of_2(q_heads), next_power_of_2(rotary_dim // 2)
    return Tile(1, heads, min(16, max(1, heads * width // PAIRS_PER_ACCESS // 32)))


def _ours_with_one_program_per_token(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    return _ours_with_tile(workload, cos, sin, tile=token_tile(workload.q_heads, workload.rotary_dim))


def _ours_with_tile(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, tile: Tile) -> Rotate:
    cos, sin, interleaved = token_rows(workload, cos), token_rows(workload, sin), is_interleaved(workload)
    rotation = Rotation(workload.rotary_dim, interleaved=interleaved, out_interleaved=interleaved)

    def rotate(q, k):
        xs = [q[None], k[None]]
        run(rotate_triton.plan_rotate, RotateTensors.of(xs, xs, cos, sin), rotation, tile)

    return in_place(rotate)


def _ours_float32(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    cos, sin = cos.repeat(workload.batch, 1), sin.repeat(workload.batch, 1)
    interleaved = is_interleaved(workload)
    return in_place(lambda q, k: interop.rotary_embedding_cos_sin(cos, sin, q, k, interleaved=interleaved))


def _ours_cache(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    table, positions = torch.cat((cos, sin), -1).to(workload.dtype), token_positions(workload, cos.device)
    head_size, is_neox = workload.head_dim, not is_interleaved(workload)

    def rotate(q, k):
        interop.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_size, table, is_neox)

    return in_place(rotate)


def _persistent(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, per_processor: int) -> Rotate:
    cos, sin = token_rows(workload, cos), token_rows(workload, sin)
    processors = torch.cuda.get_device_properties(cos.device).multi_processor_count if cos.is_cuda else 1
    options = {"interleaved": is_interleaved(workload), "blocks": processors * per_processor}
    return in_place(lambda q, k: models.rotate_heads(q, k, cos, sin, **options))


def _flash_rotary(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, version: str) -> Callable:
    """A function ``rotate(x)`` that rotates x ``[B, S, H, D]`` in place by flash-attn's Triton kernel."""
    apply_rotary = packages.load_file("flash-attn", version, "flash_attn/ops/triton/rotary.py").apply_rotary
    cos, sin = cos.to(workload.dtype), sin.to(workload.dtype)
    return partial(apply_rotary, cos=cos, sin=sin, interleaved=is_interleaved(workload), inplace=True)


def _flash_attention(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """flash-attn's kernel, once for q and once for k, with their own numbers of heads."""
    rotated = _flash_rotary(workload, cos, sin, version)
    return lambda q, k: (rotated(q.detach()), rotated(k.detach()))


def flash_packed(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """flash-attn's packed form, which rotates q and k of ``[B, S, Hq + 2 Hk, D]`` in place, in one launch."""
    rotated = _flash_rotary(workload, cos, sin, packages.locate("flash-attn")[0])
    heads = workload.q_heads + workload.k_heads
    return lambda qkv: rotated(qkv[:, :, :heads])


def _flash_packed_pair(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """The packed form on a qkv made of q and k, for the check alone; it is not timed."""
    rotated = flash_packed(workload, cos, sin)

    def rotate(q, k):
        qkv = torch.cat([x.detach() for x in (q, k, torch.zeros_like(k))], dim=2)
        rotated(qkv)
        return qkv.split((workload.q_heads, workload.k_heads, workload.k_heads), dim=2)[:2]

    return rotate


def _formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """The rotation as in vLLM's native path, in the dtype of x; the tables are ``[T, R/2]``."""
    x0, x1 = pairing.pairs(x, layout)
    cos, sin = cos[:, None], sin[:, None]
    return pairing.join(x0 * cos - x1 * sin, x1 * cos + x0 * sin, layout)


def _overwrite(q, k, cos, sin, *, layout: str) -> None:
    q.copy_(_formula(q, cos, sin, layout))
    k.copy_(_formula(k, cos, sin, layout))


@cache
def _compiled(layout: str) -> Callable:
    return torch.compile(partial(_overwrite, layout=layout), fullgraph=True)


def _native(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    cos, sin = token_rows(workload, cos), token_rows(workload, sin)
    return in_place(lambda q, k: _overwrite(q, k, cos, sin, layout=workload.layout))


def _native_compiled(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The compiled formula: one function for each layout, with a dynamic number of tokens.

    A compilation for every number of tokens would take longer than the measurements.
    """
    cos, sin = token_rows(workload, cos), token_rows(workload, sin)

    def overwrite(q, k):
        for x in (q, k, cos, sin):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        _compiled(workload.layout)(q, k, cos, sin)

    return in_place(overwrite)


def _flashinfer(
    workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str, from_cpu: bool = False
) -> Rotate:
    """FlashInfer's operator in place; ``from_cpu``: each call makes its positions on the CPU, as the document's does.

    From 0.6 on, its kernel for any head size has no barrier between the threads of a head. With 96, 160, 192 and 320
    features these threads lie in two warps. In place, one thread may then overwrite features that another thread has
    yet to read. The check decides.
    """
    if version != FLASHINFER_THEN:  # this version itself refuses head sizes for which it has no kernel
        flashinfer.require_whole_vectors(
            workload.head_dim, workload.rotary_dim, workload.layout, workload.dtype.itemsize
        )
    apply = flashinfer.module(version).apply_rope_with_cos_sin_cache_inplace
    table, positions = flashinfer.cos_sin_cache(cos, sin), token_positions(workload, cos.device)
    head_size, is_neox = workload.head_dim, not is_interleaved(workload)

    def rotate(q, k):
        at = token_positions(workload, torch.device("cpu")).to(q.device, non_blocking=True) if from_cpu else positions
        apply(at, q.flatten(1), k.flatten(1), head_size, table, is_neox)

    return in_place(rotate)


PERSISTENT_PEERS = tuple(
    contender(f"{PERSISTENT}, {count} blocks", partial(_persistent, per_processor=count))
    for count in models.BLOCKS_PER_MULTIPROCESSOR
)

CONTENDERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        contender(OURS, _ours),
        contender(OURS_CACHE, _ours_cache),
        *PERSISTENT_PEERS,
        contender(FLASH, _flash_attention, package="flash-attn"),
        contender(EAGER, _native),
        contender(COMPILED, _native_compiled),
    )
}
"""Name -> contender: all contenders that run from this repository, and flash-attn's Triton kernel."""

_FLASHINFER = {"package": flashinfer.PACKAGE, "narrow": False}

PACKAGES: tuple[Peer, ...] = (
    contender(VLLM, partial(cos_sin_cache.bind, engine="vllm"), package="vllm"),
    contender(FLASHINFER, partial(_flashinfer, version=FLASHINFER_THEN), version=FLASHINFER_THEN, **_FLASHINFER),
    contender(FLASHINFER_NEWEST, _flashinfer, **_FLASHINFER),
    contender(SGL_KERNEL, partial(cos_sin_cache.bind, engine="sglang"), package="sglang-kernel"),
)
"""The packages of which the document speaks, by their public operators."""


FROM_CPU: Peer = contender(
    FLASHINFER_FROM_CPU, partial(_flashinfer, version=FLASHINFER_THEN, from_cpu=True), version=FLASHINFER_THEN,
    **_FLASHINFER,
)  # fmt: skip
"""FlashInfer as the document's benchmark of the time called it."""

FLOAT32: Peer = contender(OURS_FLOAT32, _ours_float32)
"""Our operator with the float32 tables of diffusion models, taken as they are."""


def flash_packed_peer(name: str) -> Peer:
    """flash-attn's packed form as a function of q and k, for the check."""
    return contender(name, _flash_packed_pair, package="flash-attn")


OURS_OFF = contender("ropelab, off", _ours_with_one_program_per_token)
"""Our kernel without its launch policy for few tokens: one block a token."""


def tile_of_ours(name: str, tile: Tile) -> Peer:
    """Our kernel with this tile in place of the tile that it chooses."""
    return contender(name, partial(_ours_with_tile, tile=tile))
