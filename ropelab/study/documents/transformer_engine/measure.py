"""The measurements behind claims TE-01 to TE-21. Each returns a data frame, which ``ropelab.bench.records`` keeps.

They need a GPU. ``parity`` and ``past_the_end`` also run in Triton's interpreter, with small sizes.

Published kernels run where they can (`grids`): the pull request's own file, compiled, and TransformerEngine 2.18 and
2.20. The times are for bf16 and split-half, as in the document. ``parity`` compares the bits for other dtypes, the
interleaved layout and every rank.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import peers, timing, varlen_models
from ropelab.bench.cells import progress
from ropelab.bench.operation import tidy
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workloads import Workload
from ropelab.interop.transformer_engine import apply_rotary_pos_emb
from ropelab.kernels import INTERPRETED
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.documents.transformer_engine import grids, packings
from ropelab.study.documents.transformer_engine.contenders import rotation, runs
from ropelab.study.documents.transformer_engine.dispatch import merged_heuristic
from ropelab.study.documents.transformer_engine.grids import CODE, GIVEN, INTEROP, MODELS, PACKAGES, SUMMED
from ropelab.study.documents.transformer_engine.packings import Packing

Rotate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """The sizes of a run of ``kernels``: the sizes of the record, or small sizes to see that everything runs."""

    tokens: int
    heads: int
    head_dim: int
    rounds: int


FULL, SMOKE = Scale(packings.TOKENS, 32, 128, rounds=5), Scale(2048, 4, 128, rounds=2)


@dataclass(frozen=True)
class Case:
    """A packing with a table of ``freqs_len`` rows on one rank; ``part`` names the purpose of the measurement."""

    part: str
    packing: Packing
    freqs_len: int
    cp_size: int = 1
    cp_rank: int = 0
    steps: tuple[str, ...] = (GIVEN,)
    contenders: tuple[str, ...] = (*CODE.names, *MODELS.names, PACKAGES.new, "ropelab", "flash_attn")

    @property
    def tokens(self) -> int:
        """The tokens of this rank."""
        return self.packing.tokens // self.cp_size

    @property
    def columns(self) -> dict[str, object]:
        return {
            "part": self.part, "kind": self.packing.kind, "n_seqs": self.packing.n_seqs,
            "longest": self.packing.longest, "tokens": self.tokens, "freqs_len": self.freqs_len,
            "cp_size": self.cp_size, "cp_rank": self.cp_rank,
        }  # fmt: skip

    @property
    def description(self) -> str:
        rank = f", rank {self.cp_rank} of {self.cp_size}" if self.cp_size > 1 else ""
        return f"{self.part}: {self.packing.n_seqs} of up to {self.packing.longest}, {self.freqs_len} rows{rank}"


def cases(tokens: int = packings.TOKENS) -> list[Case]:
    """Every cell of ``kernels``.

    Three kinds of cells are not measured, for these reasons. With a full table for all packings, the legacy grid takes
    the time of its blocks. The kernel of flash-attn does not know context parallelism. Outside of table B, the old grid
    of the pull request's file runs in place of TransformerEngine 2.18 (see `contenders`).
    """
    own = (*CODE.names, *MODELS.names, "ropelab")
    both = {"steps": (GIVEN, SUMMED), "contenders": (*own, *PACKAGES.names, "flash_attn", INTEROP)}
    found = [Case("table B", packings.remainder_last(n, tokens), tokens, **both) for n in packings.N_SEQS]
    for n, parts in ((128, (64, 16, 4, 2)), (512, (16,)), (2401, (64, 16, 4, 2))):
        packing = packings.balanced(n, tokens)
        lengths = [packing.longest, *(tokens // part for part in parts)]
        # Without an empty block, and so with the sum of the document's benchmark too: the grids differ by the search.
        searched = {packing.longest: (GIVEN, SUMMED)}
        found += [
            Case("freqs_len", packing, rows, steps=searched.get(rows, (GIVEN,)), contenders=own)
            for rows in sorted(set(lengths))
        ]
    for longest, counts in ((tokens // 2, (2, 4, 8, 16, 32, 63, 64, 128, 512, 2401)),
                            (tokens // 8, (9, 16, 32, 63, 64, 128, 512, 2401))):  # fmt: skip
        found += [Case("skew", packings.skewed(n, longest, tokens), longest) for n in counts]
    for n in (128, 2401):
        packing = packings.with_empty(n, tokens)
        found.append(Case("empty", packing, packing.longest))
    found.append(Case("empty", packings.with_empty(128, tokens), tokens, contenders=own))
    for size in (2, 4, 8):
        for packing, rows, rank in (
            (packings.balanced(128, tokens, 2 * size), tokens, 0),
            (packings.balanced(128, tokens, 2 * size), tokens, size - 1),
            *((packings.skewed(n, tokens // 2, tokens, 2 * size), tokens // 2, size - 1) for n in (2, 4, 8, 16, 64)),
        ):
            found.append(Case("context parallel", packing, rows, size, rank, contenders=own))
    return found


def contenders(case: Case) -> tuple[str, ...]:
    """The contenders of a cell. The packages stand in for the pull request's file where it cannot be compiled."""
    stand_ins = () if runs(CODE) else PACKAGES.names
    return tuple(dict.fromkeys((*case.contenders, *stand_ins)))


def kernels(*, smoke: bool = False) -> pd.DataFrame:
    """Both grids, TransformerEngine, ropelab and flash-attn on packings of 65,536 tokens.

    Columns:
        part: the purpose of the cell.
        kind: the kind of packing.
        n_seqs, longest, freqs_len, cp_size, cp_rank, step, contender, status, median_us, q20_us, q80_us, samples.
        tokens: the tokens of the rank.
        same_bits: for a new grid, whether result and gradient equal the result and gradient of the old grid of its pair
            (`grids`).
    """
    require_gpu()
    if not smoke:
        return measure_kernels(cases(), FULL, "cuda")
    few = [case for case in cases(SMOKE.tokens) if case.packing.n_seqs in (1, 8, 128) and case.cp_size in (1, 8)]
    return measure_kernels(few, SMOKE, "cuda")


def measure_kernels(chosen: Iterable[Case], scale: Scale, device: str, dtype=torch.bfloat16) -> pd.DataFrame:
    """The table of ``kernels`` for these cases."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (scale.tokens, scale.heads, scale.head_dim)
    x, gradient = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    truth = Truth(scale.tokens, scale.head_dim, device)
    frames = []
    for case in progress(chosen, lambda case: case.description):
        own = x[: case.tokens].detach().requires_grad_(), gradient[: case.tokens]
        right, status, same_bits = _checked(case, truth, *own)
        for step in case.steps:
            timed = {name: partial(_call, rotate, *own, step) for name, rotate in right.items()}
            frame = timing.gpu_times(timed, rounds=scale.rounds, graph_ms=1.0)
            frames.append(tidy(frame, case.columns | {"step": step}, status))
            frames[-1]["same_bits"] = frames[-1].contender.map(same_bits)
            if device == "cuda":
                torch.cuda.empty_cache()  # frees the memory of the graphs
    return pd.concat(frames, ignore_index=True)


class Truth:
    """The float64 definition on the positions of a case, and the largest distance of a right result from it."""

    def __init__(self, rows: int, head_dim: int, device: str, layout: str = "split_half"):
        tables = {"dtype": torch.float64, "device": device}
        self.cos, self.sin = ropelab.rotary_table(rows, head_dim, **tables)
        self.layout = layout
        half = torch.outer(torch.arange(rows).float(), inverse_frequencies(head_dim, 10000.0).float()).to(device)
        self.freqs = pairing.join(half, half, layout)[:, None, None].contiguous()
        self._bounds = Workload("", 1, rows, 1, 0, head_dim, head_dim, layout=layout, seq_format="thd", lengths=(rows,))

    def of(self, x: torch.Tensor, positions: torch.Tensor, *, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The right result, and the largest error of each element; the error depends on the dtype of ``x``."""
        options = {"layout": self.layout, "seq_format": "thd", "positions": positions, "inverse": inverse}
        expected = reference.rotate(x.detach(), self.cos, self.sin, **options)
        peer = peers.Peer("", None, "float32 angles", own_tables=True)
        return expected, peers.error_bound(x, replace(self._bounds, dtype=x.dtype), peer)


def worst(found: torch.Tensor, truth: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest error of an element over its bound. A result is right if this is at most 1."""
    expected, bound = truth
    excess = ((found.detach().double() - expected).abs() / bound).max().item()
    return float("inf") if math.isnan(excess) else excess


def _checked(case: Case, truth: Truth, x, gradient) -> tuple[dict[str, Rotate], dict[str, str], dict[str, bool]]:
    """The contenders that are right, the status of the others, and for each new grid whether the bits are the same.

    The bits of a new grid are compared with the bits of the old grid of its pair. With the clock stopped, nothing is
    compared.
    """
    exact = []
    if not timing.is_stopped():
        positions = case.packing.positions(case.cp_size, case.cp_rank).to(x.device)
        exact = [truth.of(source, positions, inverse=inverse) for inverse, source in ((False, x), (True, gradient))]
    right, status, results, same_bits = {}, {}, {}, {}
    partners = dict(pair.names for pair in grids.ALL) | {pair.new: pair.old for pair in grids.ALL}
    names = contenders(case)
    for name in names:
        try:
            rotate = _bind(name, case, truth, x.device)
            if timing.is_stopped():
                right[name] = rotate
                continue
            y = rotate(x)
            found = y.detach(), torch.autograd.grad(y, x, gradient)[0]
            error = max(map(worst, found, exact))
            if error <= 1:
                right[name] = rotate
            else:
                status[name] = f"wrong: {error:.3g} times its bound"
            if partners.get(name) in results:
                new = next(pair.new for pair in grids.ALL if name in pair.names)
                same_bits[new] = all(map(torch.equal, found, results.pop(partners[name])))
            elif partners.get(name) in names:
                results[name] = found
        except Exception as error:  # a contender that cannot run is a result too
            status[name] = why_not(error)
    return right, status, same_bits


def why_not(error: Exception) -> str:
    """The status of a contender that raised."""
    return f"not run: {error}" if isinstance(error, peers.packages.NotInstalled) else timing.failure(error)


def _bind(name: str, case: Case, truth: Truth, device) -> Rotate:
    """The rotation of one tensor by a contender. Tables and positions, which layers would share, are built here."""
    cu_seqlens = case.packing.cu_seqlens(device)
    freqs, shard = truth.freqs[: case.freqs_len], {"cp_size": case.cp_size, "cp_rank": case.cp_rank}
    if any(name in pair.names for pair in grids.ALL):
        return partial(rotation(name), freqs=freqs, cu_seqlens=cu_seqlens, **shard)
    if name == INTEROP:
        return partial(apply_rotary_pos_emb, freqs=freqs, tensor_format="thd", cu_seqlens=cu_seqlens, **shard)
    cos, sin = (table[: case.freqs_len].float() for table in (truth.cos, truth.sin))
    if name == "ropelab":
        positions = ropelab.PackedSequences(cu_seqlens, case.tokens, **shard).positions
        return partial(ropelab.apply_rope, cos=cos, sin=sin, seq_format="thd", positions=positions)
    rotate = bind_peer(name, case.packing, cos, sin)
    return lambda x: rotate(x, None)[0]


def bind_peer(name: str, packing: Packing, cos: torch.Tensor, sin: torch.Tensor) -> peers.Rotate:
    """A package's rotation of packed tokens, ``rotate(q, k)``.

    Raises:
        NotInstalled: the package is not installed.
    """
    found, missing = peers.available((peers.BY_NAME[name],))
    if missing:
        raise peers.packages.NotInstalled(missing[name].removeprefix("not run: "))
    width = 2 * cos.shape[-1]
    workload = Workload("", 1, packing.tokens, 1, 0, width, width, seq_format="thd", lengths=packing.lengths)
    return found[0].bind(workload, cos, sin)


def _call(rotate: Rotate, x: torch.Tensor, gradient: torch.Tensor, step: str) -> Sequence[Callable]:
    if step == SUMMED:
        return [lambda: torch.autograd.grad(rotate(x).sum(), x)]
    return [lambda: torch.autograd.grad(rotate(x), x, gradient)]


def require_gpu() -> None:
    """Raise `Unavailable` if there is no GPU."""
    if not torch.cuda.is_available():
        raise Unavailable("times are those of a GPU")


# -------------------------------------------------------------------------------------------------------- the bits

SHARDS = ((1, 0), (2, 0), (2, 1), (4, 3), (8, 0), (8, 7))
DTYPES = {"cuda": (torch.float32, torch.bfloat16, torch.float16), "cpu": (torch.float32, torch.float16)}
"""The dtypes of ``parity`` by device. Triton's interpreter has no bf16 arithmetic."""


def parity(*, smoke: bool = False) -> pd.DataFrame:
    """Whether the two grids of each pair give the same bits and right results, with random cotangents.

    Columns:
        grids: the contenders of the pair, old and new.
        kind: the kind of packing.
        n_seqs, freqs_len, cp_size, cp_rank, dtype, layout.
        empty: the number of sequences without a token.
        past_end: the number of rows in no sequence.
        starts: whether start positions are given.
        merged_takes: the grid that the merged condition takes.
        same_result, same_gradient: whether the bits are the same in the rows of sequences.
        worst: the largest error of the two grids over its bound.
        worst_ropelab: the largest error of our own call over its bound.
        ropelab_same_bits: the share of elements of result and gradient in which our own call has the bits of the old
            grid.
    """
    device = _kernel_device()
    if device == "cpu":  # every program takes a millisecond
        return measure_parity(16, device, ((1, 0), (2, 1)), heads=2, head_dim=16)
    return measure_parity(64 if smoke else 1024, device)


MANY_ROWS = 32768
"""The rows of freqs for which the merged condition takes the new grid: three sequences have 65,536 dead blocks."""


def measure_parity(
    tokens: int, device: str, shards: Iterable[tuple[int, int]] = SHARDS, heads: int = 3, head_dim: int = 32
) -> pd.DataFrame:
    """The table of ``parity`` for ``tokens`` tokens and these sizes and ranks of context parallelism.

    TransformerEngine 2.20 chooses its grid, so the packages rotate twice: with the fewest rows of freqs that the
    positions need, and with `MANY_ROWS`.
    """
    generator, rows = torch.Generator().manual_seed(0), []
    pairs = [pair for pair in grids.ALL if runs(pair)] if device == "cuda" else [MODELS]
    for layout in LAYOUTS:
        truth = Truth(tokens + 16, head_dim, device, layout)
        table = Truth(MANY_ROWS, head_dim, device, layout).freqs if PACKAGES in pairs else truth.freqs
        for dtype, (cp_size, cp_rank) in itertools.product(DTYPES[device], shards):
            multiple = 2 * cp_size if cp_size > 1 else 1
            for packing, past_end, with_starts in (
                (packings.remainder_last(3, tokens, multiple), 0, False),
                (packings.skewed(4, tokens // 2, tokens, multiple), 3, dtype == torch.float32),
                (packings.with_empty(5, tokens, multiple), 3, False),
            ):
                shape = (tokens // cp_size + past_end, heads, head_dim)
                x, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
                starts = torch.randint(0, 16, (packing.n_seqs,), generator=generator, dtype=torch.int32)
                where = {"cu_seqlens": packing.cu_seqlens(device), "interleaved": layout == "interleaved"}
                where |= {"cp_size": cp_size, "cp_rank": cp_rank}
                where |= {"start_positions": starts.to(device)} if with_starts else {}
                inside = slice(0, tokens // cp_size)
                positions = packing.positions(cp_size, cp_rank)
                if with_starts:
                    lengths = torch.tensor(packing.lengths) // cp_size
                    positions = positions + starts.repeat_interleave(lengths)
                positions = positions.to(device)
                exact = [truth.of(x[inside], positions, inverse=False),
                         truth.of(gradient[inside], positions, inverse=True)]  # fmt: skip
                fewest = packing.longest + 16 * with_starts
                call = partial(apply_rotary_pos_emb, tensor_format="thd", **where)
                ours = _both(call, x, gradient, truth.freqs[:fewest], inside)
                for pair in pairs:
                    for freqs_len in (fewest, MANY_ROWS) if pair == PACKAGES else (fewest,):
                        old, new = (
                            _both(partial(rotation(name), **where), x, gradient, table[:freqs_len], inside)
                            for name in pair.names
                        )
                        same = [torch.equal(*both) for both in zip(old, new, strict=True)]
                        rows.append({
                            "grids": " and ".join(pair.names), "kind": packing.kind, "n_seqs": packing.n_seqs,
                            "empty": packing.lengths.count(0), "past_end": past_end, "starts": with_starts,
                            "freqs_len": freqs_len,
                            "merged_takes": merged_heuristic(packing.n_seqs, freqs_len, shape[0], cp_size),
                            "cp_size": cp_size, "cp_rank": cp_rank,
                            "dtype": str(dtype).removeprefix("torch."), "layout": layout,
                            "same_result": same[0], "same_gradient": same[1],
                            "worst": max(max(map(worst, found, exact)) for found in (old, new)),
                            "worst_ropelab": max(map(worst, ours, exact)),
                            "ropelab_same_bits": _same_part(ours, old),
                        })  # fmt: skip
    return pd.DataFrame(rows)


def _both(rotate: Callable, x, gradient, freqs, inside: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the gradient in the rows of sequences."""
    leaf = x.clone().requires_grad_()
    y = rotate(leaf, freqs)
    return y.detach()[inside], torch.autograd.grad(y, leaf, gradient)[0][inside]


def _same_part(found: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The share of all elements that are equal."""
    return torch.cat([(a == b).flatten() for a, b in zip(found, others, strict=True)]).double().mean().item()


UNGUARDED, GUARDED = "token-linear, as first proposed", "token-linear, with the guard"
"""The names of the models in the record ``past_the_end``."""
NO_TOKENS = (0,) * 20_000
"""Lengths of empty sequences. In front of other sequences they make the merged condition take the new grid."""


def past_the_end(*, smoke: bool = False) -> pd.DataFrame:
    """The outcome for the rows behind the last sequence, in memory that was poisoned before.

    The last sequence is the longest. The table has as many rows as this sequence has tokens. The memory behind the
    table holds the angle pi, so a contender that reads past the table changes the signs of the rows behind the end.

    Columns: contender, rows (behind the end), outcome: ``"left as allocated"``, ``"zeros"``, ``"reads past freqs"`` or
        ``"otherwise"``. Published code that cannot run has no row.
    """
    device, rows, lengths = _kernel_device(), 3, (4, 8)
    packing = Packing("two", lengths)
    truth = Truth(lengths[-1], 16, device)
    behind = torch.full_like(truth.freqs[: rows + 1], torch.pi)
    freqs = torch.cat((truth.freqs, behind))[: lengths[-1]]
    x = torch.randn(packing.tokens + rows, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    where = {"cu_seqlens": packing.cu_seqlens(device)}
    linear = partial(varlen_models.token_linear, angles=freqs[:, 0, 0], interleaved=False, **where)
    contenders = {
        MODELS.old: partial(rotation(MODELS.old), freqs=freqs, **where),
        UNGUARDED: partial(linear, guard=False),
        GUARDED: partial(linear, guard=True),
        "ropelab": partial(apply_rotary_pos_emb, freqs=freqs, tensor_format="thd", **where),
    }
    many = Packing("two behind empty ones", (*NO_TOKENS, *lengths)).cu_seqlens(device)
    for pair in (CODE, PACKAGES):
        if runs(pair):
            contenders |= {name: partial(rotation(name), freqs=freqs, cu_seqlens=many) for name in pair.names}
    found = []
    with poisoned_memory():
        for name, rotate in contenders.items():
            y = rotate(x)[-rows:]
            outcome = "otherwise"
            if y.isnan().all():
                outcome = "left as allocated"
            elif not y.any():
                outcome = "zeros"
            elif (y + x[-rows:]).abs().max() < 1e-5:
                outcome = "reads past freqs"
            found.append({"contender": name, "rows": rows, "outcome": outcome})
    return pd.DataFrame(found)


@contextmanager
def poisoned_memory():
    """A context in which ``torch.empty`` returns NaN, so that memory that was never written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _kernel_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if INTERPRETED:
        return "cpu"
    raise Unavailable("the kernels run on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)")
