"""The timed measurements behind claims of SGLang#14302. Each is a data frame and needs a GPU. All take about 100 s.

Unless a column says otherwise, calls are in place, forward and in bf16. The time is the GPU time of CUDA-graph replay
over several sets of buffers (`ropelab.bench.timing`). Every contender is first checked against the float64 definition.

The usual columns are the columns that identify the workload, and contender, status, median_us, q20_us, q80_us, samples
and fraction_of_copy. The fraction is the time of the fastest copy of q and k in the same rounds, divided by the time of
the contender.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import pandas as pd
import torch
from triton.testing import do_bench

from ropelab.angles.rope_parameters import axial_rope
from ropelab.bench import copies, peers, timing
from ropelab.bench.cells import progress
from ropelab.bench.launches import kernel_names
from ropelab.bench.operation import checked, divided, tidy
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workloads import Buffers, Workload
from ropelab.kernels import Rotation, rotate_triton
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile, next_power_of_2
from ropelab.layout.pairing import LAYOUTS
from ropelab.positions.axes import grid_positions
from ropelab.study.documents.sglang import contenders, kernel_contenders, models
from ropelab.study.documents.sglang.contenders import CONTENDERS, OURS_OFF, PACKAGES, PERSISTENT_PEERS
from ropelab.study.documents.sglang.kernel_contenders import (
    KERNELS,
    LAST_KERNEL_NARROW,
    LAST_KERNEL_OFF,
    SECOND_KERNEL_OFF,
    THIRD_KERNEL_NARROW,
    THIRD_KERNEL_OFF,
)
from ropelab.study.documents.sglang.names import (
    COMPILED,
    EAGER,
    FIRST_GRID,
    FIRST_KERNEL,
    FIRST_KERNEL_GATHER,
    FLASH,
    FLASH_FULL,
    FLASH_PACKED,
    HEAD_SIZES,
    JUST_IN_TIME,
    LAST_KERNEL,
    LAST_KERNEL_GATHER,
    OURS,
    OURS_CACHE,
    SECOND_KERNEL,
    SGL_KERNEL,
    THIRD_KERNEL,
    VLLM,
)

DEVICE, DTYPE = "cuda", torch.bfloat16
ROUNDS, SMOKE_ROUNDS = 9, 3
GRAPH_MS = 0.5
MOST_SETS = 32
"""The most sets of buffers. With this limit few tokens stay in the L2 cache, as they do after a projection."""


FLASHINFER_GRID = (1, 8, 64), (1, 4, 128, 2048), (64, 96, 128, 256)
"""Batches, tokens and head sizes of the document's benchmark of FlashInfer: 32 heads of q and of k, both layouts."""

LOW_TOKENS = (1, 2, 4, 8)
BLOCKS_A_TOKEN = (1, 2, 4)
PRODUCTION = (1, 27030, 24, 24, 128)
QWEN_IMAGE = "Qwen-Image"
QWEN_IMAGE_GRID = (1, 64, 64)
"""The frames, rows and columns of latent patches of an image of 1024 x 1024 pixels."""
QWEN_IMAGE_AXES = (16, 56, 56)
"""The features of a head that each of the three axes turns. There are 24 heads of 128 features."""


def _cell(batch: int, seq_len: int, q_heads: int, k_heads: int, head_dim: int, layout: str = "split_half") -> Workload:
    name = f"{batch}x{seq_len} {q_heads}/{k_heads} {head_dim}"
    first = 1000 if seq_len < 16 else 0  # at position 0 a rotation is the identity, and no check sees it
    return Workload(name, batch, seq_len, q_heads, k_heads, head_dim, head_dim, DTYPE, layout, first_position=first)


def first_cells() -> list[Workload]:
    """27 of the 112 cells of the document's first grid.

    The grid has 14 lengths. Every configuration has the lengths 1, 64 and 2048, and the first configuration also has 8,
    512 and 8192. All 112 cells would take two minutes more. 32 sequences of 8192 tokens are left out, because their
    float64 check of 1.3 GB takes longer than all the rest.
    """
    cells = [_cell(batch, s, hq, hk, d) for (batch, hq, hk, d), s in product(FIRST_GRID, (1, 64, 2048))]
    batch, hq, hk, d = FIRST_GRID[0]
    return cells + [_cell(batch, s, hq, hk, d) for s in (8, 512, 8192)]


def second_cells() -> list[Workload]:
    """10 of the 32 cells of the later grid, 32 heads of 128 in both layouts: B = 1, 16 and 128, at S = 1 and 2048.

    B = 128 at S = 2048 is left out. Its check would take three times as long as the check that is left out of the first
    grid.
    """
    shapes = [(batch, s) for batch, s in product((1, 16, 128), (1, 2048)) if batch * s <= 2**15]
    return [_cell(batch, s, 32, 32, 128, layout) for (batch, s), layout in product(shapes, LAYOUTS)]


def flashinfer_cells() -> list[Workload]:
    """The 96 cells of the document's benchmark of FlashInfer."""
    return [_cell(batch, s, 32, 32, d, layout) for batch, s, d, layout in product(*FLASHINFER_GRID, LAYOUTS)]


def head_size_cells() -> list[Workload]:
    """Every head size in the split-half layout, and 96 in both layouts."""
    sizes = [(size, "split_half") for size in HEAD_SIZES] + [(96, "interleaved")]
    return [_cell(1, 2048, 32, 8, size, layout) for size, layout in sizes]


def diffusion_cells(production_tokens: int = PRODUCTION[1]) -> list[Workload]:
    """The production shape with ``production_tokens`` tokens, and the shape of Qwen-Image; both interleaved."""
    batch, _, *rest = PRODUCTION
    image = _cell(1, prod(QWEN_IMAGE_GRID), *rest, "interleaved")
    return [_cell(batch, production_tokens, *rest, "interleaved"), replace(image, name=QWEN_IMAGE)]


# ------------------------------------------------------------------------------------------------- the protocols

# The calls of the first grid that CUDA graphs time: contender, layout, whether q and k are cloned first.
_GRAPHED = (
    (FIRST_KERNEL, "interleaved", True), (VLLM, "split_half", True), (FLASH_FULL, "split_half", True),
    (FIRST_KERNEL, "interleaved", False), (FLASH_FULL, "split_half", False), (FLASH_PACKED, "split_half", False),
    *((name, "split_half", False) for name in (FLASH, OURS, OURS_CACHE, EAGER, FIRST_KERNEL, FIRST_KERNEL_GATHER,
                                               SECOND_KERNEL, THIRD_KERNEL, LAST_KERNEL, LAST_KERNEL_GATHER,
                                               *(peer.name for peer in PERSISTENT_PEERS))),
)  # fmt: skip
_DO_BENCH = (
    (FIRST_KERNEL, "interleaved"), (VLLM, "split_half"), (FLASH_FULL, "split_half"), (EAGER, "split_half"),
    (SECOND_KERNEL, "interleaved"), (SGL_KERNEL, "split_half"),
)  # fmt: skip
"""The calls that the document's timer times, with clones: contender and layout.

The layouts differ because the document's flag for NeoX means adjacent pairs, and the other packages' flag means halves.
"""


def protocols(*, smoke: bool = False) -> pd.DataFrame:
    """The document's first grid as it was timed, and with one flaw less at a time.

    Columns besides the usual columns:
        layout: the layout of the contender. In the document the layouts of the contenders differed.
        timer: ``"do_bench"`` (an eager call after a flush of the cache) or ``"graph"``.
        clones: whether q and k are cloned in the timed region.

    Each protocol times the first version of the pull request, and the corrected protocol times the other versions.
    ``flash-attn, all heads`` is the document's benchmark of flash-attn: a packed qkv with as many key and value heads
    as query heads, cloned as a whole. ``flash-attn, packed`` has the key and value heads of the cell. Both rotate q and
    k in one launch, and ``flash-attn`` rotates them in two launches. torch.compile is only in the first configuration,
    because a compilation takes 2 s.
    """
    _require_gpu()
    cells = first_cells()
    cells = [cells[0], cells[-2]] if smoke else cells
    frames = [_protocols(cell, SMOKE_ROUNDS if smoke else ROUNDS) for cell in progress(cells, lambda cell: cell.name)]
    return pd.concat(frames, ignore_index=True)


def _protocols(cell: Workload, rounds: int) -> pd.DataFrame:
    sets = _buffers(cell)
    ready: dict[tuple[str, str], peers.Rotate] = {}
    status: dict[tuple[str, str], str] = {}
    wanted = {(name, layout) for name, layout, *_ in (*_GRAPHED, *_DO_BENCH)} | {
        (p.name, "split_half") for p in PACKAGES
    }
    if (cell.batch, cell.q_heads, cell.k_heads, cell.head_dim) == FIRST_GRID[0]:
        wanted.add((COMPILED, "split_half"))
    for layout in LAYOUTS:
        shape = replace(cell, layout=layout)
        right, reasons = _ready(shape, [p for p in _all_peers() if (p.name, layout) in wanted], sets[0])
        ready |= {(name, layout): rotate for name, rotate in right.items()}
        status |= {(name, layout): reason for name, reason in reasons.items()}
    graphed = [*_GRAPHED, *((name, layout, False) for name, layout in ready if _only_plain(name))]
    packed: dict[str, tuple[Callable, list[tuple[torch.Tensor, ...]]]] = {}
    for name, k_heads in ((FLASH_FULL, cell.q_heads), (FLASH_PACKED, cell.k_heads)):
        shape = replace(cell, k_heads=k_heads)
        right, reasons = _ready(shape, [contenders.flash_packed_peer(name)], shape.buffers(1, DEVICE)[0])
        status |= {(name, "split_half"): reason for name, reason in reasons.items()}
        if right:
            packed[name] = _flash_packed(shape, sets)

    def found(name: str, layout: str) -> tuple[Callable | None, list[tuple[torch.Tensor, ...]]]:
        return packed.get(name) or (ready.get((name, layout)), _inputs(sets))

    entries: dict[str, tuple[tuple, Callable]] = {}
    for name, layout, clones in graphed:
        rotate, inputs = found(name, layout)
        if rotate is None:
            continue
        call = partial(_cloned, rotate) if clones else rotate
        entries[f"{name}|{layout}|{clones}"] = ((name, layout, clones), partial(_calls, call, inputs))
    timed = {key: prepare for key, (_, prepare) in entries.items()}
    frame = _times(timed | copies.contenders(_inputs(sets)), rounds)
    what = [entries[name][0] if name in entries else (name, cell.layout, False) for name in frame.contender]
    frame["contender"], frame["layout"], frame["clones"] = zip(*what, strict=True)
    frame["timer"] = "graph"

    rows = [frame]
    for name, layout in _DO_BENCH:
        rotate, inputs = found(name, layout)
        if rotate is not None:
            measured = _do_bench(partial(_cloned, rotate, *inputs[0]))
            row = {"contender": name, "layout": layout, "clones": True, "timer": "do_bench", **measured}
            rows.append(pd.DataFrame([row]))
    for (name, layout), reason in status.items():
        row = {"contender": name, "layout": layout, "clones": False, "timer": "graph", "status": reason}
        rows.append(pd.DataFrame([row]))
    frame = pd.concat(rows, ignore_index=True)
    torch.cuda.empty_cache()  # frees the memory of the graphs
    identity = {key: value for key, value in cell.columns.items() if key not in ("layout", "direction")}
    return tidy(frame, identity)


def _only_plain(name: str) -> bool:
    """Whether `_GRAPHED` lacks the contender's timing without clones: the compiled formula, or a package."""
    return name == COMPILED or name in {peer.name for peer in PACKAGES}


def _cloned(rotate: Callable, *inputs: torch.Tensor):
    return rotate(*(x.clone() for x in inputs))


def _do_bench(call: Callable) -> dict:
    """The median and the quantiles of the document's timer, in microseconds."""
    try:
        if timing.is_stopped():
            call()
            return {"status": "ok"}
        median, low, high = do_bench(call, warmup=5, rep=20, quantiles=[0.5, 0.2, 0.8])
    except Exception as error:  # a call that fails is a result too
        return {"status": timing.failure(error)}
    return {"status": "ok", "median_us": 1000 * median, "q20_us": 1000 * low, "q80_us": 1000 * high}


def _flash_packed(cell: Workload, like: Sequence[Buffers]) -> tuple[Callable, list[tuple[torch.Tensor, ...]]]:
    """flash-attn's packed form, and a qkv of ``[B, S, Hq + 2 Hk, D]`` for each set of buffers in ``like``."""
    shape = cell.shape(cell.q_heads + 2 * cell.k_heads)
    sets = [(torch.randn(shape, device=DEVICE, dtype=cell.dtype),) for _ in like]
    return contenders.flash_packed(cell, like[0].cos, like[0].sin), sets


# ------------------------------------------------------------------------------------------- the other studies


def second_grid(*, smoke: bool = False) -> pd.DataFrame:
    """The document's later grid, corrected: 32 heads of q and of k, both layouts."""
    _require_gpu()
    published = (FIRST_KERNEL, SECOND_KERNEL, THIRD_KERNEL, JUST_IN_TIME, LAST_KERNEL)
    variants = (*_named((OURS, OURS_CACHE, FLASH)), *_published(published), *PACKAGES)
    cells = second_cells()
    return _compare(cells[:2] if smoke else cells, variants, smoke)


def flashinfer_calls(*, smoke: bool = False) -> pd.DataFrame:
    """The document's benchmark of FlashInfer, by its timer: every call of FlashInfer makes its positions on the CPU.

    A contender is checked with one sequence of each length.
    """
    _require_gpu()
    variants = (KERNELS[JUST_IN_TIME], contenders.FROM_CPU)
    frames = []
    for cell in progress(flashinfer_cells()[: 2 if smoke else None], lambda cell: cell.description):
        one = replace(cell, batch=1)
        right, status = _ready(one, variants, one.buffers(1, DEVICE)[0])
        (buffers,) = cell.buffers(1, DEVICE)
        bound = PeerRotation(cell, [peer for peer in variants if peer.name in right]).contenders([buffers], DEVICE)
        inputs = _inputs([buffers])[0]
        rows = [{"contender": name, **_do_bench(partial(one.run, *inputs))} for name, one in bound.items()]
        frames.append(tidy(pd.DataFrame(rows).assign(timer="do_bench"), cell.columns, status))
    return pd.concat(frames, ignore_index=True)


def head_sizes(*, smoke: bool = False) -> pd.DataFrame:
    """2048 tokens of 32/8 heads of 64 to 320 features; 96 features in both layouts.

    The status of a contender that cannot run says why.
    """
    _require_gpu()
    cells = head_size_cells()
    variants = (*_named((OURS, FLASH)), *_published((FIRST_KERNEL, LAST_KERNEL)), *PACKAGES)
    return _compare(cells[:2] if smoke else cells, variants, smoke)


def low_tokens(*, smoke: bool = False) -> pd.DataFrame:
    """1 to 8 tokens of 32/8 heads in both layouts, with different numbers of blocks for the heads of a token.

    Columns besides the usual columns:
        family: ``"first kernel"``, ``"second kernel"``, ``"third kernel"`` or ``"last kernel"`` (the published
            operator), or ``"ropelab"``.
        blocks: the blocks of the launch.
        threads: the threads of a block, for published kernels.
        multiprocessors: the multiprocessors of the GPU.
        policy: ``"on"`` or ``"off"`` for our operator and for versions with a launch policy, else empty.
    """
    _require_gpu()
    frames = []
    cells = [_cell(1, tokens, 32, 8, 128, layout) for layout in LAYOUTS for tokens in LOW_TOKENS]
    for cell in progress(cells[:: len(LOW_TOKENS)] if smoke else cells, lambda cell: cell.description):
        variants = _launch_variants(cell)
        frame = _compared(cell, [peer for peer, _ in variants.values()], SMOKE_ROUNDS if smoke else ROUNDS)
        for column in ("family", "blocks", "threads", "policy"):
            frame[column] = [variants[name][1].get(column) if name in variants else None for name in frame.contender]
        frame["multiprocessors"] = _multiprocessors()
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _launch_variants(cell: Workload) -> dict[str, tuple[peers.Peer, dict]]:
    """Name -> contender, and the columns of the record that describe its launch."""
    tokens, pairs = cell.seq_len, cell.rotary_dim // 2
    shape = tokens, cell.q_heads, pairs, cell.layout == "interleaved"
    found = {}
    for tiles in BLOCKS_A_TOKEN:
        peer = kernel_contenders.kernel_tile_variant(tiles)
        threads = min(512, cell.q_heads // tiles * pairs)
        found[peer.name] = peer, {"family": "first kernel", "blocks": tokens * tiles, "threads": threads}
    for family, on, off in (
        ("second", SECOND_KERNEL, SECOND_KERNEL_OFF),
        ("third", THIRD_KERNEL, THIRD_KERNEL_OFF),
        ("last", LAST_KERNEL, LAST_KERNEL_OFF),
    ):
        for policy, peer in ((True, KERNELS[on]), (False, off)):
            launch = models.VERSIONS[family](*shape, policy=policy)
            found[peer.name] = peer, {
                "family": f"{family} kernel", "policy": "on" if policy else "off", "blocks": tokens * launch.tiles,
                "threads": launch.threads,
            }  # fmt: skip
    tile = contenders.token_tile(cell.q_heads, cell.rotary_dim)
    found[OURS] = CONTENDERS[OURS], {"family": "ropelab", "blocks": _blocks(cell), "policy": "on"}
    found[OURS_OFF.name] = OURS_OFF, {"family": "ropelab", "blocks": _blocks(cell, tile), "policy": "off"}
    for heads in (4, 2, 1):
        tile = Tile(1, heads, max(1, heads * next_power_of_2(pairs) // PAIRS_PER_ACCESS // 32))
        peer = contenders.tile_of_ours(f"ropelab, {heads} head{'s' * (heads > 1)} a program", tile)
        found[peer.name] = peer, {"family": "ropelab", "blocks": _blocks(cell, tile)}
    return found


def _blocks(cell: Workload, tile: Tile | None = None) -> int:
    """The number of blocks of our launch for this cell; ``tile`` is by default the tile that the kernel chooses."""
    xs = [torch.empty(cell.shape(heads), dtype=cell.dtype, device="meta") for heads in (cell.q_heads, cell.k_heads)]
    table = torch.empty(cell.seq_len, cell.rotary_dim // 2, dtype=cell.dtype, device="meta")
    interleaved = cell.layout == "interleaved"
    rotation = Rotation(cell.rotary_dim, interleaved=interleaved, out_interleaved=interleaved)
    grid = rotate_triton.plan_rotate(RotateTensors.of(xs, xs, table, table), rotation, tile).grid
    return grid[0] * grid[1] * grid[2]


def vector_widths(*, smoke: bool = False) -> pd.DataFrame:
    """8192 tokens of 32/8 heads of 128 with narrow and wide accesses, at addresses divisible by 16 or by 2 only.

    Columns besides the usual columns:
        offset_bytes: the distance of q and k from a multiple of 16 bytes.
        kernel_bytes: for published kernels, the bytes of an access to q and k.
    """
    _require_gpu()
    cell, frames = _cell(1, 64 if smoke else 8192, 32, 8, 128), []
    published = {KERNELS[FIRST_KERNEL]: 2, KERNELS[THIRD_KERNEL]: 16, KERNELS[LAST_KERNEL]: 16, THIRD_KERNEL_NARROW: 2,
                 LAST_KERNEL_NARROW: 2}  # fmt: skip
    variants = [CONTENDERS[OURS], *published]
    for layout, offset in progress(product(LAYOUTS, (0, 1)), lambda item: f"{item[0]}, {2 * item[1]} bytes off"):
        shape = replace(cell, layout=layout)
        sets = [_shifted(one, offset) for one in _buffers(shape)]
        frame = _compared(shape, variants, SMOKE_ROUNDS if smoke else ROUNDS, sets, where_they_lie=offset > 0)
        frame["offset_bytes"] = offset * cell.dtype.itemsize
        frame["kernel_bytes"] = frame.contender.map({peer.name: bytes_ for peer, bytes_ in published.items()})
        if offset:
            frame["kernel_bytes"] = frame.kernel_bytes.clip(upper=cell.dtype.itemsize)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _shifted(buffers: Buffers, offset: int) -> Buffers:
    """The same q and k, ``offset`` elements behind a multiple of 16 bytes."""

    def shift(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)[offset:]
        return memory.view(x.shape).copy_(x.detach()).requires_grad_()

    return replace(buffers, q=shift(buffers.q), k=shift(buffers.k)) if offset else buffers


def diffusion(*, smoke: bool = False) -> pd.DataFrame:
    """The production shape and a Qwen-Image-shaped case with axial tables, 24 heads of 128, interleaved.

    The column besides the usual columns is launches, the number of kernels of one call. In every call, ``cast``
    converts the real and imaginary parts of a complex64 table to contiguous tables in the dtype of q. The document's
    models did so before it cached the tables. ``float32 tables`` hands our kernel the contiguous float32 tables, which
    need no conversion.
    """
    _require_gpu()
    rope = axial_rope(QWEN_IMAGE_AXES)
    positions = grid_positions(*QWEN_IMAGE_GRID, centred=(1, 2), device=DEVICE)
    axial = rope.tables(512, positions, device=DEVICE)
    cases = list(zip(diffusion_cells(64) if smoke else diffusion_cells(), (None, axial), strict=True))
    published = _published((FIRST_KERNEL, SECOND_KERNEL, THIRD_KERNEL, JUST_IN_TIME, LAST_KERNEL))
    tables_of_models = kernel_contenders.CAST, contenders.FLOAT32
    names = (OURS, FLASH, EAGER, COMPILED)
    variants = (*_named(names), *published, *tables_of_models, *PERSISTENT_PEERS, *PACKAGES)
    frames = []
    for cell, tables in progress(cases, lambda case: case[0].name):
        sets = _buffers(cell)
        if tables is not None:
            sets = [replace(one, cos=tables[0].float(), sin=tables[1].float()) for one in sets]
        exact = None if tables is None else rope.tables(512, positions, dtype=torch.float64, device=positions.device)
        frames.append(_compared(cell, variants, SMOKE_ROUNDS if smoke else ROUNDS, sets, exact, count_launches=True))
    return pd.concat(frames, ignore_index=True)


# -------------------------------------------------------------------------------------------------------- helpers


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise Unavailable("times are taken on a GPU")


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _named(names: Iterable[str]) -> tuple[peers.Peer, ...]:
    return tuple(CONTENDERS[name] for name in names)


def _published(names: Iterable[str]) -> tuple[peers.Peer, ...]:
    return tuple(KERNELS[name] for name in names)


def _all_peers() -> tuple[peers.Peer, ...]:
    return (*CONTENDERS.values(), *KERNELS.values(), *PACKAGES)


def _buffers(cell: Workload) -> list[Buffers]:
    return cell.buffers(min(cell.cold_count(timing.cache_bytes()), MOST_SETS), DEVICE)


def _inputs(sets: Sequence[Buffers]) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(x.detach() for x in one.inputs) for one in sets]


def _calls(call: Callable, sets: Sequence[Sequence[torch.Tensor]]) -> list[Callable]:
    return [partial(call, *one) for one in sets]


def _times(prepared: Mapping[str, Callable], rounds: int) -> pd.DataFrame:
    return copies.with_fraction(timing.gpu_times(prepared, rounds=rounds, graph_ms=GRAPH_MS))


def _ready(
    cell: Workload, variants: Sequence[peers.Peer], buffers: Buffers, exact: tuple[torch.Tensor, ...] | None = None
) -> tuple[dict[str, peers.Rotate], dict[str, str]]:
    """Name -> rotation for the contenders that are right, and name -> reason for the others."""
    rotation = PeerRotation(cell, variants, exact=exact)
    found = rotation.contenders([buffers], DEVICE)
    right, wrong = divided(found, checked(rotation, [buffers], found, DEVICE, cell.direction), cell.direction)
    return {name: one.run for name, one in right.items()}, wrong


def _compare(cells: Sequence[Workload], variants: Sequence[peers.Peer], smoke: bool) -> pd.DataFrame:
    rounds = SMOKE_ROUNDS if smoke else ROUNDS
    frames = [_compared(cell, variants, rounds) for cell in progress(cells, lambda cell: cell.description)]
    return pd.concat(frames, ignore_index=True)


def _same_results(rotate: peers.Rotate, *inputs: torch.Tensor) -> bool:
    """Whether the rotation gives the same result for tensors at their own addresses as for copies; overwrites them.

    For other accesses the compiler may fuse another product of the same source with the sum. The float32 results then
    differ by a rounding of each product, and the results in the dtype of the inputs by a unit in the last place.
    """
    expected = rotate(*(x.clone() for x in inputs))
    largest = max(x.abs().max().item() for x in inputs)
    close = {"rtol": torch.finfo(inputs[0].dtype).eps, "atol": 2 * torch.finfo(torch.float32).eps * largest}
    return all(torch.allclose(x, y, **close) for x, y in zip(rotate(*inputs), expected, strict=True))


def _compared(
    cell: Workload,
    variants: Sequence[peers.Peer],
    rounds: int,
    sets: Sequence[Buffers] | None = None,
    exact: tuple[torch.Tensor, ...] | None = None,
    count_launches: bool = False,
    where_they_lie: bool = False,
) -> pd.DataFrame:
    """The times of the variants that are right, and of the copies, in the same rounds.

    Args:
        exact: as for `ropelab.bench.peers.check`, which looks at copies of q and k that torch allocates.
        where_they_lie: a variant is right only if its result for q and k at their own addresses is the same.
    """
    sets = sets or _buffers(cell)
    ready, status = _ready(cell, variants, sets[0], exact)
    if where_they_lie:
        differing = [name for name, rotate in ready.items() if not _same_results(rotate, *_inputs(sets)[0])]
        for name in differing:
            del ready[name]
            status[name] = "wrong: another result than at multiples of 16 bytes"
    timed = {name: partial(_calls, rotate, _inputs(sets)) for name, rotate in ready.items()}
    frame = tidy(_times(timed | copies.contenders(_inputs(sets)), rounds), cell.columns, status)
    if count_launches:
        launches = {name: len(kernel_names(partial(rotate, *_inputs(sets)[0]))) for name, rotate in ready.items()}
        frame["launches"] = frame.contender.map(launches)
    torch.cuda.empty_cache()  # frees the memory of the graphs
    return frame
