"""The faults of kernels as Triton kernels, for a GPU or for Triton's interpreter (TRITON_INTERPRET=1).

The interpreter runs the programs one after another in the order of the grid, so that a race always has the same
outcome. An access out of bounds would end the process. The masks therefore keep the wrong accesses of the faults within
the storage of the tensor, where they still give wrong results.

All kernels rotate halves; the right implementation rotates adjacent pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ropelab.kernels import NO_POSITION
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.layout.pairing import pairs
from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault

_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}
_GRID_AXIS_LIMIT = 65_535  # of the axes y and z of a grid in CUDA


@triton.jit
def _rotate_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr, seq_len, heads, table_rows, x_end, y_end,
    x_stride_b, x_stride_s, x_stride_h, y_stride_b, y_stride_s, y_stride_h,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, COMPUTE: tl.constexpr,
    MASK_BY_TABLE: tl.constexpr, INT32: tl.constexpr, VECTOR: tl.constexpr, TOKENS_ON_Y: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a block of tokens. Each of the last four constants switches a fault on."""
    block = tl.program_id(1 if TOKENS_ON_Y else 0)
    batch = tl.num_programs(2) - 1 - tl.program_id(2)  # the last sequence first: shows writes beyond a sequence
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    feature = tl.arange(0, BLOCK)[None, None, :]
    is_token = token < seq_len
    position = tl.load(positions_ptr + batch * seq_len + token, mask=is_token, other=0)
    if MASK_BY_TABLE:
        position = tl.where(is_token, position, tl.load(positions_ptr + batch * seq_len) + token)
        is_token = position < table_rows

    is_first = feature // VECTOR * VECTOR < PAIRS  # the first feature of a vector decides for the whole vector
    partner = tl.where(is_first, feature + PAIRS, feature - PAIRS)
    rotates = (feature < 2 * PAIRS) & (position >= 0)
    at = position * PAIRS + tl.where(is_first, feature, partner)
    has_angle = rotates & (at >= 0) & (at < table_rows * PAIRS)
    cos = tl.load(cos_ptr + at, mask=has_angle, other=1).to(COMPUTE)
    sin = tl.load(sin_ptr + at, mask=has_angle, other=0).to(COMPUTE)

    if not INT32:
        batch, token, head = batch.to(tl.int64), token.to(tl.int64), head.to(tl.int64)
    x_row = batch * x_stride_b + token * x_stride_s + head * x_stride_h
    y_at = batch * y_stride_b + token * y_stride_s + head * y_stride_h + feature
    x_at, other_at = x_row + feature, x_row + partner
    mask = is_token & (head < heads) & (feature < HEAD_DIM)
    x = tl.load(x_ptr + x_at, mask=mask & (x_at >= 0) & (x_at < x_end), other=0)
    other = tl.load(x_ptr + other_at, mask=mask & rotates & (other_at >= 0) & (other_at < x_end), other=0)
    rotated = x.to(COMPUTE) * cos + tl.where(is_first, -other.to(COMPUTE), other.to(COMPUTE)) * sin
    y = tl.where(rotates, rotated.to(x.dtype), x)
    tl.store(y_ptr + y_at, y, mask=mask & (y_at >= 0) & (y_at < y_end))


def _launch(x, y, cos, sin, positions, *, strides=None, mask_by_table=False, int32=False, vector=1, tokens_on_y=False):
    """Rotate ``x`` into ``y``, both ``[B, S, H, D]``; each keyword switches a fault on.

    Args:
        cos, sin: ``[P, R/2]``.
        positions: ``[B, S]``.

    Raises:
        ValueError: the tables are wider than a head, or ``positions`` has another shape.
        RuntimeError: a grid that CUDA would refuse, with ``tokens_on_y``.
    """
    batch, seq_len, heads, head_dim = x.shape
    _check_width(cos, head_dim)
    if positions.shape != (batch, seq_len):
        raise ValueError(f"positions: expected shape {(batch, seq_len)}, got {tuple(positions.shape)}")
    if not x.numel():
        return
    if tokens_on_y and seq_len > _GRID_AXIS_LIMIT and not x.is_cuda:  # the interpreter has no limit
        raise RuntimeError("Triton Error [CUDA]: invalid argument")
    block_tokens = 1 if tokens_on_y else 8
    if not x.is_cuda:  # the interpreter takes milliseconds for every program
        block_tokens = triton.next_power_of_2(seq_len) if tokens_on_y else max(8, triton.next_power_of_2(seq_len) // 8)
    blocks = triton.cdiv(seq_len, block_tokens)
    _rotate_kernel[(1, blocks, batch) if tokens_on_y else (blocks, 1, batch)](
        x, y, cos.contiguous(), sin.contiguous(), positions.int().contiguous(), seq_len, heads, len(cos),
        _room(x), _room(y), *(strides or x.stride()[:3]), *(strides or y.stride()[:3]),
        PAIRS=cos.shape[-1], HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim), BLOCK_TOKENS=block_tokens,
        BLOCK_HEADS=triton.next_power_of_2(heads), COMPUTE=_TL_DTYPE[compute_dtype(x, cos)],
        MASK_BY_TABLE=mask_by_table, INT32=int32, VECTOR=vector, TOKENS_ON_Y=tokens_on_y,
    )  # fmt: skip


def _check_width(cos: torch.Tensor, head_dim: int) -> None:
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"cos: expected at most {head_dim // 2} columns, got {cos.shape[-1]}")


def _room(x: torch.Tensor) -> int:
    """Return the number of elements from the first element of ``x`` to the end of its storage."""
    return int(x.untyped_storage().nbytes() // x.element_size() - x.storage_offset())


def _rotated(x, cos, sin, positions, **faults):
    """Return the result of `_launch` in a new tensor, with a gradient that has the same faults."""

    def forward(x):
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch(x, y, cos, sin, positions, **faults)
        return y.masked_fill((positions == NO_POSITION)[..., None, None], 0)

    return correct.with_backward(x, forward, lambda grad: _rotated(grad, cos, -sin, positions, **faults))


def _flash_attn(x, cos, sin, interleaved, inplace, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, **faults):
    """Do the work of `correct.flash_attn` with a faulty kernel."""
    positions = correct.flash_positions(x, seqlen_offsets, cu_seqlens)
    if interleaved:
        y = correct.turn_at(x, cos, sin, positions, "interleaved")
    elif cu_seqlens is None:
        y = _rotated(x, cos, sin, positions, **faults)
    else:
        y = _rotated(x[None], cos, sin, positions[None], **faults)[0]
    return x.copy_(y) if inplace else y


@fault(
    "The mask asks whether the table has a row, not whether the sequence has a token.",
    symptom="writes after the last token: into the next sequence, or out of bounds",
    seen_in="fla#423",
    convention="flash_attn",
    triton=True,
    race=True,
    must_fail=("definition", "batch_independent"),
)
def mask_checks_the_table(x, cos, sin, interleaved=False, inplace=False, **where):
    return _flash_attn(x, cos, sin, interleaved, inplace, **where, mask_by_table=True)


@fault(
    "Memory offsets are products of 32-bit integers.",
    symptom="illegal access or silent corruption beyond 2**31 elements",
    seen_in="Liger-Kernel#804, vllm#43166",
    convention="flash_attn",
    triton=True,
    must_fail=("huge",),
)
def offsets_in_int32(x, cos, sin, interleaved=False, inplace=False, **where):
    return _flash_attn(x, cos, sin, interleaved, inplace, **where, int32=True)


@fault(
    "A vector of 16 features is taken for one half of the head, although vectors straddle the middle.",
    symptom="8 or 12 wrong features of every head unless rotary_dim is a multiple of 32",
    seen_in="FlashInfer (fallback for unusual head sizes; read in its source)",
    convention="flash_attn",
    options={"head_dim": 48, "rotary_dim": 48},
    triton=True,
    must_fail=("definition", "isometry", "layout"),
)
def vectors_straddle_the_halves(x, cos, sin, interleaved=False, inplace=False, **where):
    return _flash_attn(x, cos, sin, interleaved, inplace, **where, vector=16)


@fault(
    "Tokens are counted along the y axis of the grid, which has at most 65,535 blocks.",
    symptom="the launch fails for longer sequences",
    seen_in="Fast-LLM#386",
    convention="flash_attn",
    triton=True,
    must_fail=("huge",),
)
def tokens_on_the_y_axis(x, cos, sin, interleaved=False, inplace=False, **where):
    return _flash_attn(x, cos, sin, interleaved, inplace, **where, tokens_on_y=True)


@fault(
    "Keys are addressed with the strides of the queries.",
    symptom="wrong keys, and accesses out of bounds, in models with fewer key heads",
    seen_in="ColossalAI#6444",
    convention="vllm",
    triton=True,
    must_fail=("definition", "guards"),
)
def key_read_with_query_strides(positions, query, key, head_size, cos_sin_cache, is_neox):
    if not is_neox:
        return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    q, k = (x.unflatten(-1, (-1, head_size))[None] for x in (query, key))
    for x in (q, k):
        _launch(x, x, cos, sin, positions[None], strides=q.stride()[:3])
    return query, key


@triton.jit
def _one_lane_per_feature(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, tokens, table_rows, stride_t, stride_h,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Read a feature and its partner in many rows, and overwrite the feature. Each program has one feature."""
    feature, token = tl.program_id(0), tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    head = tl.arange(0, BLOCK_HEADS)[None, :]
    mask = (token < tokens) & (head < HEADS)
    row = x_ptr + token.to(tl.int64) * stride_t + head * stride_h
    is_first = feature < PAIRS
    partner = tl.where(is_first, feature + PAIRS, feature - PAIRS)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0)
    has_row = (position >= 0) & (position < table_rows)
    at = position * PAIRS + feature % PAIRS
    cos = tl.load(cos_ptr + at, mask=has_row, other=1).to(COMPUTE)
    sin = tl.load(sin_ptr + at, mask=has_row, other=0).to(COMPUTE)
    x = tl.load(row + feature, mask=mask).to(COMPUTE)
    other = tl.load(row + partner, mask=mask).to(COMPUTE)
    y = x * cos + tl.where(is_first, -other, other) * sin
    tl.store(row + feature, y.to(x_ptr.dtype.element_ty), mask=mask)


@fault(
    "Each lane overwrites a feature that another lane may still have to read.",
    symptom="a race: the partner is sometimes read after its rotation",
    seen_in="FlagGems#5143",
    convention="vllm",
    triton=True,
    race=True,
    must_fail=("definition", "isometry"),
)
def one_lane_per_feature_in_place(positions, query, key, head_size, cos_sin_cache, is_neox):
    if not is_neox:
        return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)
    cos, sin = (table.contiguous() for table in cos_sin_cache.chunk(2, dim=-1))
    for x in (query, key):
        heads = x.unflatten(-1, (-1, head_size))
        _check_width(cos, head_size)
        if not heads.numel():
            continue
        _one_lane_per_feature[(cos_sin_cache.shape[-1], triton.cdiv(len(x), 64))](
            heads, cos, sin, positions.contiguous(), len(heads), len(cos), *heads.stride()[:2],
            HEADS=heads.shape[1], BLOCK_HEADS=triton.next_power_of_2(heads.shape[1]), PAIRS=cos.shape[-1],
            BLOCK_TOKENS=64, COMPUTE=_TL_DTYPE[compute_dtype(x, cos)],
        )  # fmt: skip
    return query, key


@triton.jit
def _adjacent_from_halves(
    x_ptr, cos_ptr, sin_ptr, rows, stride, PAIRS: tl.constexpr, SHARE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Rotate half of the pairs of a block of rows backwards, in place: read them as halves, store them as adjacent."""
    pair = tl.program_id(0) * SHARE + tl.arange(0, SHARE)[None, :]
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    mask = (row < rows) & (pair < PAIRS)
    x = x_ptr + row.to(tl.int64) * stride
    cos = tl.load(cos_ptr + row * PAIRS + pair, mask=mask).to(COMPUTE)
    sin = tl.load(sin_ptr + row * PAIRS + pair, mask=mask).to(COMPUTE)
    x0, x1 = tl.load(x + pair, mask=mask).to(COMPUTE), tl.load(x + PAIRS + pair, mask=mask).to(COMPUTE)
    tl.store(x + 2 * pair, (x0 * cos + x1 * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x + 2 * pair + 1, (x1 * cos - x0 * sin).to(x_ptr.dtype.element_ty), mask=mask)


@fault(
    "Two programs each reorder half of the features of a gradient in place.",
    symptom="a gradient that changes from run to run",
    seen_in="Megatron-LM#5980",
    convention="huggingface",
    options={"layout": "interleaved", "out_layout": "split_half"},
    triton=True,
    race=True,
    must_fail=("adjoint",),
)
def reordered_in_place(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    cos, sin = (pairs(table, "interleaved")[0].unsqueeze(heads) for table in (cos, sin))

    _check_width(cos, q.shape[-1])

    def rotate_back(grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        planes = cos.shape[-1]
        tables = (table.expand(*grad.shape[:-1], planes).contiguous() for table in (cos, sin))
        rows = grad.shape[:-1].numel()
        if rows:
            _adjacent_from_halves[(2, triton.cdiv(rows, 64))](
                grad, *tables, rows, grad.shape[-1], PAIRS=planes, SHARE=triton.next_power_of_2(triton.cdiv(planes, 2)),
                BLOCK_ROWS=64, COMPUTE=_TL_DTYPE[compute_dtype(grad, cos)],
            )  # fmt: skip
        return grad

    def one(x):
        return correct.with_backward(x, lambda x: correct.turn(x, cos, sin, "interleaved", "split_half"), rotate_back)

    return one(q), one(k)


@fault(
    "`if not grad.is_contiguous` lacks its call, so that a strided gradient is rotated without a copy.",
    symptom="wrong gradient after a sum, whose cotangent is a single number with strides 0: all threads write to it",
    seen_in="unsloth#3782",
    convention="huggingface",
    triton=True,
    race=True,
    must_fail=("adjoint_expanded",),
)
def contiguity_test_without_call(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    half = cos.shape[-1] // 2
    batch, seq_len = q.shape[0], q.shape[3 - heads]
    rows = [table[..., :half].expand(batch, -1, -1).reshape(-1, half) for table in (cos, sin)]
    positions = torch.arange(batch * seq_len, device=q.device).view(batch, seq_len)

    def rotate_back(grad):
        if not grad.is_contiguous:
            grad = grad.contiguous()
        x = grad.transpose(1, 2) if heads == 1 else grad
        _launch(x, x, rows[0], -rows[1], positions)
        return grad

    def one(x):
        cos_, sin_ = (table[..., :half].unsqueeze(heads) for table in (cos, sin))
        return correct.with_backward(x, lambda x: correct.turn(x, cos_, sin_), rotate_back)

    return one(q), one(k)
