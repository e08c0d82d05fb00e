"""Bind the published operator of SGLang#14302, in its states, as contenders of the study."""

from dataclasses import replace
from functools import partial

import torch

from ropelab.bench.peers import Peer, Rotate
from ropelab.bench.workloads import Workload
from ropelab.study.documents.sglang import kernels
from ropelab.study.documents.sglang.binding import contender, in_place, is_interleaved, token_positions, token_rows
from ropelab.study.documents.sglang.names import (
    FIRST_KERNEL,
    FIRST_KERNEL_GATHER,
    JUST_IN_TIME,
    JUST_IN_TIME_CAST,
    LAST_KERNEL,
    LAST_KERNEL_GATHER,
    SECOND_KERNEL,
    THIRD_KERNEL,
)


def published_tables(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables ``[S, R/2]`` as the published operator takes them: a row for each token, in the dtype of q.

    For adjacent pairs the operator takes ``[T, R/2]``, and for halves ``[T, R]``.
    """
    tables = (token_rows(workload, table) for table in (cos, sin))
    if not is_interleaved(workload):
        tables = (torch.cat((table, table), dim=-1) for table in tables)
    return tuple(table.contiguous() for table in tables)


def _kernel(
    workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, state: str, blocks: int = 1, operator=None
) -> Rotate:
    """The published operator as a contender.

    Args:
        blocks: the blocks of each token. The operator gets views in which a token has this many rows of heads.
        operator: by default the published operator in this state.
    """
    operator = operator or kernels.operator(state)
    cos, sin = (table.repeat_interleave(blocks, dim=0) for table in published_tables(workload, cos, sin))
    head_size, adjacent = workload.head_dim, is_interleaved(workload)

    def rotate(q, k):
        q, k = (x.view(len(x) * blocks, -1, head_size) for x in (q, k))
        operator(cos, sin, q, k, head_size, adjacent)

    return in_place(rotate)


def _kernel_by_one_block(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, state: str, wide: bool) -> Rotate:
    return _kernel(workload, cos, sin, state=state, operator=kernels.by_one_block(state, wide=wide))


def _kernel_gather(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, state: str) -> Rotate:
    """The operator with the two index kernels that make its tables, as a caller with a cache needs them."""
    operator, positions = kernels.operator(state), token_positions(workload, cos.device)
    one = replace(workload, batch=1)
    tables = published_tables(one, cos, sin)
    head_size, adjacent = workload.head_dim, is_interleaved(workload)

    def rotate(q, k):
        operator(*(t.index_select(0, positions) for t in tables), q, k, head_size, adjacent)

    return in_place(rotate)


def _kernel_cast(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """The just-in-time version with tables that every call makes anew from the complex table of diffusion models."""
    operator, head_size = kernels.operator("just in time"), workload.head_dim
    turns, adjacent = torch.complex(cos, sin).repeat(workload.batch, 1), is_interleaved(workload)

    def rotate(q, k):
        tables = (part.to(workload.dtype).contiguous() for part in (turns.real, turns.imag))
        operator(*(t if adjacent else torch.cat((t, t), dim=-1) for t in tables), q, k, head_size, adjacent)

    return in_place(rotate)


KERNELS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        contender(FIRST_KERNEL, partial(_kernel, state="first")),
        contender(FIRST_KERNEL_GATHER, partial(_kernel_gather, state="first")),
        contender(SECOND_KERNEL, partial(_kernel, state="second")),
        contender(THIRD_KERNEL, partial(_kernel, state="third")),
        contender(JUST_IN_TIME, partial(_kernel, state="just in time")),
        contender(LAST_KERNEL, partial(_kernel, state="last")),
        contender(LAST_KERNEL_GATHER, partial(_kernel_gather, state="last")),
    )
}
"""Name -> contender: the published operator of the document, in its states."""

CAST: Peer = contender(JUST_IN_TIME_CAST, _kernel_cast)
"""The contender that converts the tables of diffusion models in every call."""


def kernel_tile_variant(blocks: int) -> Peer:
    """The first version with ``blocks`` blocks a token: the operator gets views with more rows of fewer heads."""
    bind = partial(_kernel, state="first", blocks=blocks)
    return contender(f"{FIRST_KERNEL}, {blocks} block{'s' * (blocks > 1)} a token", bind)


def by_one_block(name: str, state: str, *, wide: bool) -> Peer:
    """The published kernel of a state, launched with a block for each token and with wide or narrow accesses."""
    return contender(name, partial(_kernel_by_one_block, state=state, wide=wide))


SECOND_KERNEL_OFF = by_one_block(f"{SECOND_KERNEL}, off", "second", wide=False)
THIRD_KERNEL_OFF = by_one_block(f"{THIRD_KERNEL}, off", "third", wide=True)
LAST_KERNEL_OFF = by_one_block(f"{LAST_KERNEL}, off", "last", wide=True)
THIRD_KERNEL_NARROW = by_one_block(f"{THIRD_KERNEL}, narrow", "third", wide=False)
LAST_KERNEL_NARROW = by_one_block(f"{LAST_KERNEL}, narrow", "last", wide=False)
