"""Who is compared in the study of SGLang#14302, and how each is called: adapters for `ropelab.bench.peers`.

All rotate q and k in place, forward, on ``[B, S, H, D]`` seen as ``T = B S`` tokens, with tables in the dtype of q as
the document's operator asks. The names of `KERNELS` are the operator as published (`documents.sglang.kernels`). Names
that end in "(model)" are re-creations (`documents.sglang.models`) and no measurement of the packages; the packages
themselves are `PACKAGES`. Operators and packages that are not installed are not run.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
import torch._dynamo

from ropelab.bench import packages
from ropelab.bench.peers import Peer, Rotate, flashinfer, vllm
from ropelab.bench.workloads import Workload
from ropelab.interop import sglang as interop
from ropelab.kernels import Rotation, rotate_triton
from ropelab.kernels.tiles import Tile
from ropelab.layout import pairing
from ropelab.study.documents.sglang import kernels, models
from ropelab.study.documents.sglang.models import Launch

OURS, OURS_CACHE = "ropelab", "ropelab, positions"
DOCUMENT, DOCUMENT_GATHER = "first version (model)", "first version (model), gather"
SECOND, THIRD = "second version (model)", "third version (model)"
DOCUMENT_CAST, OURS_FLOAT32 = "first version (model), cast", "ropelab, float32 tables"
FIRST_KERNEL, FIRST_KERNEL_GATHER, FIRST_KERNEL_CAST = "first version", "first version, gather", "first version, cast"
SECOND_KERNEL, THIRD_KERNEL = "second version", "third version"
JUST_IN_TIME, LAST_KERNEL = "just-in-time version", "last version"
"""The published operator, in the states of `kernels.STATES`."""
VLLM = "vLLM (model)"
"""The first version's kernel with one load more, of the position: what divides the two is that load alone."""
PERSISTENT = "warp per head (model)"
"""What the names of its variants begin with: `PERSISTENT_PEERS`, so many blocks a multiprocessor."""
FLASH, FLASH_PACKED, FLASH_FULL = "flash-attn", "flash-attn, packed", "flash-attn, all heads"
EAGER, COMPILED = "eager", "compile"
FLASHINFER, FLASHINFER_NEWEST, SGL_KERNEL = "FlashInfer", "FlashInfer, newest", "sgl_kernel"
REAL_VLLM = "vLLM"

PUBLISHED: dict[str, str] = {
    DOCUMENT: FIRST_KERNEL, DOCUMENT_GATHER: FIRST_KERNEL_GATHER, DOCUMENT_CAST: FIRST_KERNEL_CAST,
    SECOND: SECOND_KERNEL, THIRD: THIRD_KERNEL, VLLM: REAL_VLLM,
}  # fmt: skip
"""The name of a model -> the name of the published kernel that the model re-creates."""

FLASHINFER_THEN = "0.5.3"
"""The version of November 2025, when the document was under review."""


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H, D]`` -> ``[T, H, D]``, without a gradient: what is overwritten may not be a leaf that has one."""
    return x.detach().flatten(0, 1)


def _rows(workload: Workload, table: torch.Tensor) -> torch.Tensor:
    """``[S, R/2]`` float32 -> ``[T, R/2]`` in the dtype of q: a row for each token."""
    return table.to(workload.dtype).repeat(workload.batch, 1)


def _positions(workload: Workload, device: torch.device) -> torch.Tensor:
    """``[T]``: the rows of the tables ``[S, R/2]``."""
    return torch.arange(workload.seq_len, device=device).repeat(workload.batch)


def _in_place(rotate: Callable[[torch.Tensor, torch.Tensor], object]) -> Rotate:
    """A function of ``[T, H, D]`` that overwrites, as one that returns what it was given."""

    def rotated(q, k):
        rotate(_tokens(q), _tokens(k))
        return q.detach(), k.detach()

    return rotated


def _is_interleaved(workload: Workload) -> bool:
    return workload.layout == "interleaved"


def _ours(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, low_token_launch: bool = True) -> Rotate:
    cos, sin = _rows(workload, cos), _rows(workload, sin)
    options = {"interleaved": _is_interleaved(workload), "low_token_launch": low_token_launch}
    return _in_place(lambda q, k: interop.rotary_embedding_cos_sin(cos, sin, q, k, **options))


def _ours_with_tile(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, tile: Tile) -> Rotate:
    cos, sin, interleaved = _rows(workload, cos), _rows(workload, sin), _is_interleaved(workload)
    rotation = Rotation(workload.rotary_dim, interleaved=interleaved, out_interleaved=interleaved)

    def rotate(q, k):
        xs = [q[None], k[None]]
        rotate_triton.rotate(xs, xs, cos, sin, rotation, tile=tile)

    return _in_place(rotate)


def _ours_float32(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    cos, sin = cos.repeat(workload.batch, 1), sin.repeat(workload.batch, 1)
    interleaved = _is_interleaved(workload)
    return _in_place(lambda q, k: interop.rotary_embedding_cos_sin(cos, sin, q, k, interleaved=interleaved))


def _ours_cache(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    table, positions = torch.cat((cos, sin), -1).to(workload.dtype), _positions(workload, cos.device)
    head_size, is_neox = workload.head_dim, not _is_interleaved(workload)

    def rotate(q, k):
        interop.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_size, table, is_neox)

    return _in_place(rotate)


def _model(
    workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, launch: Callable[..., Launch] = models.first_launch
) -> Rotate:
    cos, sin, interleaved = _rows(workload, cos), _rows(workload, sin), _is_interleaved(workload)
    heads, pairs = max(workload.q_heads, workload.k_heads), workload.rotary_dim // 2
    chosen = launch(workload.batch * workload.seq_len, heads, pairs, interleaved)
    return _in_place(lambda q, k: models.rotate_tokens(q, k, cos, sin, interleaved=interleaved, launch=chosen))


def _model_gather(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The first version with the two index kernels that make its tables, as a caller with a cache needs them."""
    positions, tables = _positions(workload, cos.device), [t.to(workload.dtype) for t in (cos, sin)]
    interleaved = _is_interleaved(workload)

    def rotate(q, k):
        models.rotate_tokens(q, k, *(t.index_select(0, positions) for t in tables), interleaved=interleaved)

    return _in_place(rotate)


def _model_cast(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The first version with tables that every call makes anew of a complex one, as diffusion models keep them."""
    turns, interleaved = torch.complex(cos, sin).repeat(workload.batch, 1), _is_interleaved(workload)

    def rotate(q, k):
        tables = (part.to(workload.dtype).contiguous() for part in (turns.real, turns.imag))
        models.rotate_tokens(q, k, *tables, interleaved=interleaved)

    return _in_place(rotate)


def _vllm_model(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    cos, sin = torch.cat((cos, sin), -1).to(workload.dtype).chunk(2, -1)  # one cache, as there
    options = {"interleaved": _is_interleaved(workload), "positions": _positions(workload, cos.device)}
    return _in_place(lambda q, k: models.rotate_tokens(q, k, cos, sin, **options))


def _persistent(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, per_processor: int) -> Rotate:
    cos, sin = _rows(workload, cos), _rows(workload, sin)
    processors = torch.cuda.get_device_properties(cos.device).multi_processor_count if cos.is_cuda else 1
    options = {"interleaved": _is_interleaved(workload), "blocks": processors * per_processor}
    return _in_place(lambda q, k: models.rotate_heads(q, k, cos, sin, **options))


def _flash_rotary(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, version: str) -> Callable:
    """``rotate(x)`` in place by its Triton kernel; x ``[B, S, H, D]``."""
    apply_rotary = packages.load_file("flash-attn", version, "flash_attn/ops/triton/rotary.py").apply_rotary
    cos, sin = cos.to(workload.dtype), sin.to(workload.dtype)
    return partial(apply_rotary, cos=cos, sin=sin, interleaved=_is_interleaved(workload), inplace=True)


def _flash_attention(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Once for q and once for k, with as many heads as they have."""
    rotated = _flash_rotary(workload, cos, sin, version)
    return lambda q, k: (rotated(q.detach()), rotated(k.detach()))


def flash_packed(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its packed form: rotates q and k of ``[B, S, Hq + 2 Hk, D]`` in place, in one launch."""
    rotated = _flash_rotary(workload, cos, sin, packages.locate("flash-attn")[0])
    heads = workload.q_heads + workload.k_heads
    return lambda qkv: rotated(qkv[:, :, :heads])


def _flash_packed_pair(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """The packed form on a qkv made of q and k: to be checked, not timed."""
    rotated = flash_packed(workload, cos, sin)

    def rotate(q, k):
        qkv = torch.cat([x.detach() for x in (q, k, torch.zeros_like(k))], dim=2)
        rotated(qkv)
        return qkv.split((workload.q_heads, workload.k_heads, workload.k_heads), dim=2)[:2]

    return rotate


def _formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """As vLLM's native path: in the dtype of x, tables ``[T, R/2]``."""
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
    cos, sin = _rows(workload, cos), _rows(workload, sin)
    return _in_place(lambda q, k: _overwrite(q, k, cos, sin, layout=workload.layout))


def _native_compiled(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """One compiled function a layout, with a dynamic number of tokens: a compilation takes longer than a cell."""
    cos, sin = _rows(workload, cos), _rows(workload, sin)

    def overwrite(q, k):
        for x in (q, k, cos, sin):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        _compiled(workload.layout)(q, k, cos, sin)

    return _in_place(overwrite)


def published_tables(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables ``[S, R/2]`` as the published operator takes them: per token and in the dtype of q.

    For adjacent pairs the operator takes ``[T, R/2]``, for halves ``[T, R]``.
    """
    tables = (_rows(workload, table) for table in (cos, sin))
    if not _is_interleaved(workload):
        tables = (torch.cat((table, table), dim=-1) for table in tables)
    return tuple(table.contiguous() for table in tables)


def _kernel(
    workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, state: str, blocks: int = 1, operator=None
) -> Rotate:
    """The published operator.

    Args:
        blocks: views of q, k and the tables give a token so many rows of heads, and thereby so many blocks.
        operator: by default the published operator in this state.
    """
    operator = operator or kernels.operator(state)
    cos, sin = (table.repeat_interleave(blocks, dim=0) for table in published_tables(workload, cos, sin))
    head_size, adjacent = workload.head_dim, _is_interleaved(workload)

    def rotate(q, k):
        q, k = (x.view(len(x) * blocks, -1, head_size) for x in (q, k))
        operator(cos, sin, q, k, head_size, adjacent)

    return _in_place(rotate)


def _kernel_by_one_block(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, state: str, wide: bool) -> Rotate:
    return _kernel(workload, cos, sin, state=state, operator=kernels.by_one_block(state, wide=wide))


def _kernel_gather(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The first version with the two index kernels that make its tables, as a caller with a cache needs them."""
    operator, positions = kernels.operator("first"), _positions(workload, cos.device)
    one = replace(workload, batch=1)
    tables = published_tables(one, cos, sin)
    head_size, adjacent = workload.head_dim, _is_interleaved(workload)

    def rotate(q, k):
        operator(*(t.index_select(0, positions) for t in tables), q, k, head_size, adjacent)

    return _in_place(rotate)


def _kernel_cast(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The first version with tables that every call makes anew of a complex one, as diffusion models keep them."""
    operator, head_size = kernels.operator("first"), workload.head_dim
    turns, adjacent = torch.complex(cos, sin).repeat(workload.batch, 1), _is_interleaved(workload)

    def rotate(q, k):
        tables = (part.to(workload.dtype).contiguous() for part in (turns.real, turns.imag))
        operator(*(t if adjacent else torch.cat((t, t), dim=-1) for t in tables), q, k, head_size, adjacent)

    return _in_place(rotate)


def _flashinfer(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """From 0.6 on its kernel for any head size has no barrier between the threads of a head, which may lie in two warps
    (96, 160, 192 and 320 features): in place, one may overwrite what another has yet to read. The check decides."""
    if version != FLASHINFER_THEN:  # which refuses by itself what it has no kernel for
        flashinfer.require_whole_vectors(
            workload.head_dim, workload.rotary_dim, workload.layout, workload.dtype.itemsize
        )
    return _positions_api(workload, cos, sin, flashinfer.module(version))


def _sgl_kernel(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    operators = importlib.import_module("ropelab.bench.peers.sglang_kernel").operators(version)
    return _positions_api(workload, cos, sin, operators)


def _positions_api(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, module) -> Rotate:
    """FlashInfer's, or SGLang's copy of it; the cache is float32 there."""
    apply = module.apply_rope_with_cos_sin_cache_inplace
    table, positions = flashinfer.cos_sin_cache(cos, sin), _positions(workload, cos.device)
    head_size, is_neox = workload.head_dim, not _is_interleaved(workload)
    return _in_place(lambda q, k: apply(positions, q.flatten(1), k.flatten(1), head_size, table, is_neox))


def _peer(name: str, bind, **more) -> Peer:
    options = {"tables": "rounded to the dtype of q", "directions": ("forward",), "in_place": True, "narrow": True}
    return Peer(name, bind, **(options | more))


PERSISTENT_PEERS = tuple(
    _peer(f"{PERSISTENT}, {count} blocks", partial(_persistent, per_processor=count))
    for count in models.BLOCKS_PER_MULTIPROCESSOR
)

CONTENDERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _peer(OURS, _ours),
        _peer(OURS_CACHE, _ours_cache),
        _peer(DOCUMENT, _model),
        _peer(DOCUMENT_GATHER, _model_gather),
        _peer(SECOND, partial(_model, launch=models.second_launch)),
        _peer(THIRD, partial(_model, launch=models.third_launch)),
        _peer(VLLM, _vllm_model),
        *PERSISTENT_PEERS,
        _peer(FLASH, _flash_attention, package="flash-attn"),
        _peer(EAGER, _native),
        _peer(COMPILED, _native_compiled),
    )
}
"""By name: all that run from this repository, and flash-attn's Triton kernel."""

KERNELS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _peer(FIRST_KERNEL, partial(_kernel, state="first")),
        _peer(FIRST_KERNEL_GATHER, _kernel_gather),
        _peer(SECOND_KERNEL, partial(_kernel, state="second")),
        _peer(THIRD_KERNEL, partial(_kernel, state="third")),
        _peer(JUST_IN_TIME, partial(_kernel, state="just in time")),
        _peer(LAST_KERNEL, partial(_kernel, state="last")),
    )
}
"""By name: the published operator of the document, in its states."""

_FLASHINFER = {"package": flashinfer.PACKAGE, "tables": "float32", "narrow": False}

PACKAGES: tuple[Peer, ...] = (
    _peer(REAL_VLLM, vllm.bind, package="vllm"),
    _peer(FLASHINFER, partial(_flashinfer, version=FLASHINFER_THEN), version=FLASHINFER_THEN, **_FLASHINFER),
    _peer(FLASHINFER_NEWEST, _flashinfer, **_FLASHINFER),
    _peer(SGL_KERNEL, _sgl_kernel, **(_FLASHINFER | {"package": "sglang-kernel"})),
)
"""The packages of which the document speaks, by their public operators."""


CAST: tuple[Peer, ...] = (
    _peer(DOCUMENT_CAST, _model_cast),
    _peer(FIRST_KERNEL_CAST, _kernel_cast),
    _peer(OURS_FLOAT32, _ours_float32),
)
"""With tables as diffusion models have them: converted in every call, and taken as they are."""


def flash_packed_peer(name: str) -> Peer:
    """flash-attn's packed form as a function of q and k, for the check."""
    return _peer(name, _flash_packed_pair, package="flash-attn")


def tile_variant(tiles: int) -> Peer:
    """The first version's kernel with so many blocks a token."""
    launch = partial(models.first_launch, tiles=tiles)
    return _peer(f"model, {tiles} block{'s' * (tiles > 1)} a token", partial(_model, launch=launch))


def width_variant(pairs_per_thread: int) -> Peer:
    """The first version's kernel with so many pairs per thread and step."""
    launch = partial(models.first_launch, pairs_per_thread=pairs_per_thread)
    return _peer(
        f"model, {pairs_per_thread} pair{'s' * (pairs_per_thread > 1)} a thread", partial(_model, launch=launch)
    )


def kernel_tile_variant(blocks: int) -> Peer:
    """The first version with so many blocks a token: the operator gets views with fewer heads a row, and more rows."""
    bind = partial(_kernel, state="first", blocks=blocks)
    return _peer(f"{FIRST_KERNEL}, {blocks} block{'s' * (blocks > 1)} a token", bind)


def by_one_block(name: str, state: str, *, wide: bool) -> Peer:
    """The published kernel of a state with a block for each token: without launch policy, or with narrow accesses."""
    return _peer(name, partial(_kernel_by_one_block, state=state, wide=wide))


SECOND_KERNEL_OFF = by_one_block(f"{SECOND_KERNEL}, off", "second", wide=False)
THIRD_KERNEL_OFF = by_one_block(f"{THIRD_KERNEL}, off", "third", wide=True)
LAST_KERNEL_OFF = by_one_block(f"{LAST_KERNEL}, off", "last", wide=True)
THIRD_KERNEL_NARROW = by_one_block(f"{THIRD_KERNEL}, narrow", "third", wide=False)
LAST_KERNEL_NARROW = by_one_block(f"{LAST_KERNEL}, narrow", "last", wide=False)

SECOND_OFF, THIRD_OFF = (
    _peer(f"{name}, off", partial(_model, launch=partial(launch, policy=False)))
    for name, launch in ((SECOND, models.second_launch), (THIRD, models.third_launch))
)
OURS_OFF = _peer("ropelab, off", partial(_ours, low_token_launch=False))
"""Without their launch policy for few tokens: one block a token."""


def tile_of_ours(name: str, tile: Tile) -> Peer:
    """Our kernel with a tile that it would not choose."""
    return _peer(name, partial(_ours_with_tile, tile=tile))
