"""TransformerEngine#3057: fused RoPE of packed sequences with a block for each token.

``data/claims/transformer_engine.toml`` has the claims and their tests, and the notebook ``11_transformer_engine`` asks
the records. Here stands the rest, in this order: the packings and the heuristics that choose a grid, the evidence that
a CPU computes, the tables of the records behind rules and chapter, the rule with the remarks, and the studies, which
measure the records. Judging imports nothing that measures, so a study imports timer and peers where it calls them.

TransformerEngine#3057 has versions, and ``data/sources.toml`` says what was read of each. *First* is the pull request
as the document shows it. *Reviewed* has another heuristic, one thread that searches, and a guard for the rows behind
the last sequence. *Renamed* has another name for its variable and is otherwise the same. *Merged* (commit 0d1594aa0,
first released in 2.19) has one more condition and no variable. `rotation` runs the published kernels of *first* and
*merged* beside our models.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from ropelab import PackedSequences, apply_rope, reference, rotary_table
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import replaced
from ropelab.bench.cells import progress
from ropelab.bench.packages import NotInstalled
from ropelab.bench.rows import is_right, need
from ropelab.bench.study import Study
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.transformer_engine import LEGACY, LINEAR, apply_rotary_pos_emb, thd_grid
from ropelab.kernels import INTERPRETED
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.engine import noise, roles
from ropelab.study.engine.claims import TABLES, Claim
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.judging import above
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.sources import cases, facts, where
from ropelab.study.engine.verdict import Basis, Untold, Verdict, fact
from ropelab.study.engine.words import listed, value_range

# ----------------------------------------------------------------------- the packings, and which grid a heuristic takes

TOKENS = 65536
"""The tokens of all ranks together, as in the document."""
N_SEQS = (1, 8, 32, 128, 512, 1024, 2401)
"""The numbers of sequences in table B. Table A has the numbers from 128 on."""


@dataclass(frozen=True)
class Packing:
    """Sequences of these lengths, not sharded; ``kind`` says how they were made."""

    kind: str
    lengths: tuple[int, ...]

    @property
    def n_seqs(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def positions(self, cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
        """The positions of a rank's tokens, int64 ``[T / cp_size]``.

        Rank ``r`` has the chunks ``r`` and ``2 cp_size - 1 - r`` of every sequence.
        """
        pieces = []
        for length in self.lengths:
            chunks = torch.arange(length).reshape(2 * cp_size, -1) if cp_size > 1 else torch.arange(length)[None]
            pieces += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else [chunks[0]]
        return torch.cat(pieces)

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """The offsets of the sequences, int32 ``[n + 1]``."""
        return torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)


def remainder_last(n: int, tokens: int = TOKENS, multiple: int = 2) -> Packing:
    """Sequences of one even length; the last also takes the remainder, as in table B (2400 x 26 + 3136)."""
    each = tokens // n // multiple * multiple
    return Packing("remainder last", (*[each] * (n - 1), tokens - each * (n - 1)))


def balanced(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Sequences whose lengths differ by at most ``multiple``, as in table A."""
    each, longer = divmod(tokens // multiple, n)
    return Packing("balanced", (*[(each + 1) * multiple] * longer, *[each * multiple] * (n - longer)))


def skewed(n: int, longest: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """One long sequence, then ``n - 1`` balanced sequences."""
    return Packing("skewed", (longest, *balanced(n - 1, tokens - longest, multiple).lengths))


def with_empty(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Sequences of which every other is empty, beginning with the first; the others are balanced."""
    full = iter(balanced(n // 2, tokens, multiple).lengths)
    return Packing("every other empty", tuple(next(full) if i % 2 and i < 2 * (n // 2) else 0 for i in range(n)))


OVERRIDE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
VARIABLES = {"first": OVERRIDE, "reviewed": OVERRIDE, "renamed": "NVTE_FUSED_ROPE_THD_LINEAR_GRID", "merged": None}
VERSIONS = tuple(VARIABLES)


def first_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """The first condition: linear from 64 sequences on, if the legacy grid has 8 times as many blocks as tokens."""
    return LINEAR if tokens > 0 and n_seqs >= 64 and freqs_len * n_seqs >= 8 * tokens else LEGACY


def reviewed_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """Linear if the legacy grid has more than ``2 cp_size`` times as many blocks as tokens on this rank."""
    return LINEAR if tokens > 0 and freqs_len * n_seqs > 2 * cp_size * tokens else LEGACY


def merged_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """The merged condition: as reviewed, and the legacy grid has at least 65,536 blocks more than tokens."""
    return thd_grid(n_seqs, freqs_len, tokens, cp_size)


HEURISTICS: dict[str, Callable[..., str]] = {"first": first_heuristic, "merged": merged_heuristic}
"""The heuristics that are judged against the times: the heuristic of the claims, and the heuristic that was merged."""
_OF_VERSION = {"reviewed": reviewed_heuristic, "renamed": reviewed_heuristic} | HEURISTICS


def choose(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1, *, version: str = "first") -> str:
    """The strategy that a version takes. All versions but ``merged`` obey their variable (``VARIABLES``) of 0 or 1."""
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {VERSIONS}, got {version!r}")
    override = os.environ.get(VARIABLES[version] or "")
    if tokens > 0 and override in ("0", "1"):
        return LINEAR if override == "1" else LEGACY
    return _OF_VERSION[version](n_seqs, freqs_len, tokens, cp_size)


# --------------------------------------------------------------------------------------------------- the pairs of grids
# A pair of contenders is the document's own code, the packages, or our models. A record names each contender, and the
# tables speak of the old and the new grid: `canonical` gives the contenders of one pair these names.

OLD, NEW = "old grid", "new grid"
"""The names of the chosen pair in tables: a block for each row of freqs and each sequence, a block for each token."""

INTEROP = "ropelab, TransformerEngine's call"
GIVEN, SUMMED = "forward and backward", "with sum()"
"""The steps: the backward starts from a given random cotangent or, as in the document, from the sum of the result."""

WITHOUT = "without RoPE"
LAYER, ALONE = "layer", "RoPE of q and k alone"


@dataclass(frozen=True)
class Grids:
    """A pair of contenders: an old and a new grid.

    Attributes:
        old, new: the names in records.
        basis: the basis of a verdict on their evidence.
        words: the pair in words, for a sentence and a legend.
    """

    old: str
    new: str
    basis: Basis
    words: str

    @property
    def names(self) -> tuple[str, str]:
        return self.old, self.new

    @property
    def roles(self) -> dict[str, str]:
        """The role of each contender: `OLD` and `NEW` -> its name."""
        return {OLD: self.old, NEW: self.new}


CODE = Grids("#3057 (6c46696), old grid", "#3057 (6c46696), new grid", Basis.CODE, "first version, 6c46696")
"""The file of the first version of the pull request, compiled; its environment variable forces each grid."""
PACKAGES = Grids("TransformerEngine 2.18", "TransformerEngine 2.20", Basis.PACKAGE, "TransformerEngine")
"""The packages: 2.18 has the old grid alone, and 2.20 chooses by the merged condition."""
MODELS = Grids("legacy grid", "token-linear, reads twice", Basis.MODEL, "model")
"""Our models in `ropelab.bench.varlen_models`."""

PAIRS = (CODE, PACKAGES, MODELS)
"""All pairs. The first pair that was run decides."""
FORCED = (CODE, MODELS)
"""The pairs whose new grid runs in every cell, whatever a condition says."""


def chosen(frame: pd.DataFrame, allowed: Sequence[Grids] = PAIRS) -> Grids:
    """The first of the allowed pairs of which the record has right rows; the last pair where it has none."""
    return allowed[roles.first_that_ran(frame, [pair.roles for pair in allowed])]


def canonical(frame: pd.DataFrame, allowed: Sequence[Grids] = PAIRS) -> pd.DataFrame:
    """The record with the names `OLD` and `NEW` for the contenders of the chosen pair; other rows keep their names."""
    if {OLD, NEW} & set(frame.contender):
        return frame
    return roles.under_roles(frame, chosen(frame, allowed).roles)


# ------------------------------------------------------------------------------------------------- evidence, on the CPU

THREADS, WARP = 256, 32
"""The threads of a block and of a warp. The reads of one address by a warp are one request."""


@evidence("te_published_a", "the document's table of layers")
def published_a() -> pd.DataFrame:
    """The document's table A, with the ratio that follows from its milliseconds."""
    frame = pd.read_csv(TABLES / "transformer_engine_3057_a.csv")
    return frame.assign(speedup=frame.old_ms / frame.new_ms)


@evidence("te_published_b", "the document's table of kernels")
def published_b() -> pd.DataFrame:
    """The document's table B, with the ratio, the dead blocks, and the nanoseconds of a dead block in a pass.

    A pass is a forward or a backward. The nanoseconds follow from the difference of the kernels, because all other
    costs of a block are in the new kernel too.
    """
    frame = pd.read_csv(TABLES / "transformer_engine_3057_b.csv")
    dead = TOKENS * (frame.n_seqs - 1)
    ns = (frame.old_ms - frame.new_ms) * 1e6 / (2 * dead.where(dead > 0))
    return frame.assign(speedup=frame.old_ms / frame.new_ms, dead_blocks=dead, ns_per_dead_block=ns)


@evidence("te_search", "counted on the CPU")
def search() -> pd.DataFrame:
    """The reads of ``cu_seqlens`` by the search of a block, for as many sequences as in table B.

    Columns: n_seqs, steps (the most that a token needs), thread_reads (steps of all threads), warp_requests.
    """
    rows = []
    for n in N_SEQS:
        steps = max(map(_steps, [n] * n, range(n)))
        rows.append({"n_seqs": n, "steps": steps, "thread_reads": steps * THREADS,
                     "warp_requests": steps * THREADS // WARP})  # fmt: skip
    return pd.DataFrame(rows)


def _steps(n: int, sequence: int) -> int:
    """The steps of the search for a token of this sequence, as in ``ropelab.bench.varlen_models``."""
    low, high, steps = 0, n, 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle > sequence else (middle, high)
        steps += 1
    return steps


@evidence(
    "te_source", "facts of the source (data/sources.toml, data/documents/facts.csv), and our model of the dispatch"
)
def source() -> pd.DataFrame:
    """The facts of each version of the dispatch.

    Columns:
        version.
        read: the commit, and the place where the fact was read.
        variable: the environment variable, empty where a version has none.
        zero, one: the kernels that these values of the variable force.
        model: whether our model launches the same kernels.
        least_sequences, blocks_per_token, more_than, times_cp_size, least_dead_blocks: the condition of the new kernel.
        no_tokens: the kernel for no tokens, where this was read.
        guard: whether rows behind the last sequence are left out.
        threads: the number of threads of a block that search.
        blocks: the number of blocks of the new kernel, where this was read.
    """
    rows = []
    for found in map(_dispatch, facts("dispatch", "transformer_engine")):
        variable, forced = found.get("variable", ""), found.get("forces", {})
        same = []
        for value, strategy in forced.items():
            with replaced.entries(os.environ, {variable: value}):
                chosen = [choose(n, TOKENS, TOKENS, version=found["version"]) for n in N_SEQS]
            same.append(set(chosen) == {strategy})
        condition = ("least_sequences", "blocks_per_token", "more_than", "times_cp_size")
        rows.append({
            "version": found["version"], "read": where(found), "variable": variable, "zero": forced.get("0", ""),
            "one": forced.get("1", ""), "model": all(same), **{name: found[name] for name in condition},
            "least_dead_blocks": found.get("least_dead_blocks", 0), "no_tokens": found.get("no_tokens", ""),
            "guard": found["guard"], "threads": found["threads_that_search"], "blocks": found.get("blocks", ""),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _dispatch(fact: dict) -> dict:
    """The facts of a version, where patterns read them in the file: what each value of the variable returns, and so on.

    Every thread searches where no condition stands before the search. A comparison with ``<`` turns down fewer blocks
    than named, so that as many are enough.
    """
    if "found" not in fact:
        return fact
    found, taken = fact["found"], {"false": LEGACY, "true": LINEAR, "": ""}
    _, comparison, times = re.split(r"(<=?)", found["too_few_blocks"])
    return fact | {
        "variable": found["variable"], "forces": {"0": taken[found["zero"]], "1": taken[found["one"]]},
        "no_tokens": taken[found["no_tokens"]], "least_sequences": int(found["least_sequences"]),
        "blocks_per_token": int(times.split()[0]), "more_than": comparison == "<=", "times_cp_size": "cp_size" in times,
        "guard": bool(found["guard"]), "blocks": found["blocks"],
        "threads_that_search": WARP * int(found["warps"]) if found["search"].startswith("int b_id") else 1,
    }  # fmt: skip


@evidence("te_parity_tests", "the parametrisation of the tests (data/sources.toml, data/documents/facts.csv)")
def parity_tests() -> pd.DataFrame:
    """The tests that compare the kernels, of each version whose file is known.

    Columns:
        version, test.
        read: the commit, and the place where the fact was read.
        kernels: both kernels, or the new kernel beside the unfused function.
        float16, rank_above_0, context_parallel, empty: whether some case of the test has this property.
    """
    rows = []
    for test in facts("test", "transformer_engine"):
        about = {"version": test["version"], "test": test["name"], "read": where(test), "kernels": test["kernels"]}
        if found := test.get("found"):  # read by patterns
            rows.append({
                **about, "float16": "float16" in re.findall(r"\w+", found["dtypes"]),
                "rank_above_0": found["cp_rank"] != "0",
                "context_parallel": any(int(size) > 1 for size in found["cp_sizes"].split(",")),
                "empty": bool(found["zero_length"]),
            })  # fmt: skip
            continue
        each = [case for case in cases(test) if case["cp_rank"] < case["cp_size"]]
        rows.append({
            **about, "float16": any(case["dtype"] == "float16" for case in each),
            "rank_above_0": any(case["cp_rank"] > 0 for case in each),
            "context_parallel": any(case["cp_size"] > 1 for case in each), "empty": any(test["zero_length"]),
        })  # fmt: skip
    return pd.DataFrame(rows)


# -------------------------------------------------------------------------------------------- the tables of the records

CELL = ["part", "kind", "n_seqs", "longest", "tokens", "freqs_len", "cp_size", "cp_rank"]


def times(kernels: pd.DataFrame, step: str = GIVEN) -> pd.DataFrame:
    """Microseconds by cell (rows) and contender (columns), NaN where it was not right; and the cell's dead blocks."""
    return _by_cell(kernels, step, "median_us")


def intervals(kernels: pd.DataFrame) -> pd.DataFrame:
    """The table of ``times`` with the interval of each time in place of the median."""
    return _by_cell(kernels.assign(interval=kernels[is_right(kernels)].apply(noise.time, axis=1)), GIVEN, "interval")


def _by_cell(kernels: pd.DataFrame, step: str, values: str) -> pd.DataFrame:
    kernels = canonical(kernels)
    rows = kernels[is_right(kernels) & (kernels.step == step)]
    table = rows.pivot_table(index=CELL, columns="contender", values=values, aggfunc="first", sort=False)
    names = dict.fromkeys([OLD, NEW, "ropelab", *table])
    table = table.reindex(columns=list(names)).rename_axis(columns=None).reset_index()
    return table.assign(dead_blocks=table.freqs_len * table.n_seqs - table.tokens)


def choices(kernels: pd.DataFrame) -> pd.DataFrame:
    """The grid that each heuristic would take in every cell, and how much longer it takes than the faster grid.

    Columns, besides the columns of ``times``, for each heuristic:
        <name>: its choice.
        <name>_costs: the time of the choice over the time of the faster grid.
        <name>_slower: whether the choice is slower by more than the noise of both times.
    """
    kernels = canonical(kernels, FORCED)
    both = times(kernels)[[OLD, NEW]].notna().all(axis=1)
    table = times(kernels)[both].reset_index(drop=True)
    limits = intervals(kernels)[both].reset_index(drop=True)
    best = table[[OLD, NEW]].min(axis=1)
    for name, heuristic in HEURISTICS.items():
        arguments = zip(table.n_seqs, table.freqs_len, table.tokens, table.cp_size, strict=True)
        strategies = [heuristic(*map(int, each)) for each in arguments]
        taken = [table.at[i, grid_of(strategy)] for i, strategy in enumerate(strategies)]
        ratios = (limits[OLD] / limits[NEW], limits[NEW] / limits[OLD])
        over = [ratios[strategy == LINEAR][i] for i, strategy in enumerate(strategies)]
        table[name], table[f"{name}_costs"] = strategies, taken / best
        table[f"{name}_slower"] = [above(ratio, 1.0) is True for ratio in over]
    return table


def grid_of(strategy: str) -> str:
    """The grid of a strategy, `NEW` or `OLD`."""
    return NEW if strategy == LINEAR else OLD


def missed(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The cells of ``choices`` in which a heuristic takes the slower grid, worst first."""
    return table[table[f"{name}_slower"]].sort_values(f"{name}_costs", ascending=False)


def missed_words(table: pd.DataFrame, name: str) -> str:
    """The misses of a heuristic in words: ``"takes the slower grid in 3 of 9 cells, at worst 2.31 times as long"``."""
    lost = missed(table, name)
    worst = f", at worst {lost[f'{name}_costs'].iloc[0]:.2f} times as long" if len(lost) else ""
    return f"takes the slower grid in {len(lost)} of {len(table)} cells{worst}"


def whose(kernels: pd.DataFrame) -> str:
    """The words that name the source of the grids in a record."""
    pair = chosen(kernels)
    if pair == PACKAGES:
        return "TransformerEngine 2.18 has the old grid, and the new grid is the choice of TransformerEngine 2.20"
    return (
        "both grids are our models"
        if pair.basis is Basis.MODEL
        else f"both grids come from the file of the {pair.words}"
    )


def _beside_packages(table: pd.DataFrame) -> str:
    """The times of TransformerEngine over the times of the grids, where both were timed, else nothing.

    2.18 has the old grid alone. 2.20 has the grid after the review, and the old grid.
    """
    said = []
    for name, grids in ((PACKAGES.old, [OLD]), (PACKAGES.new, [OLD, NEW])):
        if name in table and {OLD, NEW} <= set(table):
            ratio = (table[name] / table[grids].min(axis=1)).dropna()
            beside = "the old grid" if grids == [OLD] else "the faster grid"
            if len(ratio):
                said.append(f"{name} takes {value_range(ratio)} of the time of {beside}")
    return "; ".join(said)


# ------------------------------------------------------------------------------------------------ the rule, and remarks

ON_A_LINE = 0.99
"""The least share of the variance of times that a line explains, where a claim states that they scale."""
MANY = 512
"""The sequences from which on the empty blocks take nearly all of the old grid's time."""


@rule("TE-01", "te_kernels")
def rows_times_sequences(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """The times must lie on a rising line over the blocks: in table B as the document times it, beyond it in all
    packings of one rank.
    """
    kernels = canonical(kernels, (CODE,))

    def on_a_line(table: pd.DataFrame) -> Verdict:
        table = table.dropna(subset=[OLD])
        blocks = table.freqs_len * table.n_seqs
        if len(table) < 3:  # a line goes through any two
            raise Untold(claim.needs)
        correlation, slope = blocks.corr(table[OLD]), np.polyfit(blocks, table[OLD], 1)[0]
        ns, explained = 1000 * slope / 2, 100 * correlation**2
        return fact(correlation > 0 and explained >= 100 * ON_A_LINE).with_text(
            f"{ns:.2f} ns for each block and pass, {blocks.min():,} to {blocks.max():,} blocks; a line explains "
            f"{explained:.3f} % of the variance of {len(table)} times, all of {listed(table.tokens)} tokens",
            ns=ns, most=blocks.max(), rows=table.freqs_len.max(), explained=explained, launches=len(table),
        )  # fmt: skip

    table_b = times(kernels, SUMMED).query("part == 'table B'")
    all_lengths = on_a_line(times(kernels).query("cp_size == 1"))
    wider = replace(all_lengths, numbers={"explained_beyond": all_lengths.numbers["explained"]})
    return on_a_line(table_b).beside(wider)


@remark("TE-01", "te_published_b")
def price_of_a_block(published: pd.DataFrame) -> str:
    stated = published.ns_per_dead_block[published.n_seqs >= 128]
    return (
        f"in table B an empty block costs {value_range(stated)} ns from 128 sequences on; few empty blocks cost less "
        "each, because they hide behind live blocks"
    )


@remark("TE-05", "te_kernels")
def beside_the_packages(kernels: pd.DataFrame) -> str:
    table = times(kernels, SUMMED).query("part == 'table B'")
    said = [_beside_packages(table)]
    if PACKAGES.old in table:
        many = table[table.n_seqs >= MANY]
        off = np.exp(np.log(many[OLD] / many[PACKAGES.old]).abs().max()) - 1
        said.append(f"the old grid's time is at most {off:.1%} off that of {PACKAGES.old} from {MANY} sequences on")
    return "; ".join(filter(None, said))


@remark("TE-06", "te_kernels", "te_published_b")
def growth_of_the_new_kernel(kernels: pd.DataFrame, published: pd.DataFrame) -> str:
    table = times(kernels).query("part == 'table B'").set_index("n_seqs")
    new, stated = table[NEW], published.set_index("n_seqs").new_ms
    ends = [1, published.n_seqs.max()]
    grown, printed = (times[ends[1]] / times[ends[0]] - 1 for times in (new, stated))
    return (
        f"{ends[1]:,} sequences take {grown:+.1%} of the time of one (table B: {printed:+.0%}); since the review one "
        "thread searches, here every thread does"
    )


@remark("TE-11", "te_search")
def requests_of_a_warp(search: pd.DataFrame) -> str:
    row = search.set_index("n_seqs").loc[2401]
    asked = f"{row.warp_requests} requests of {THREADS} threads"
    return f"the threads of a warp ask for one address together: {asked}"


@remark("TE-22", "te_kernels")
def growth_with_one_search(kernels: pd.DataFrame) -> tuple[str, dict[str, object]]:
    """The growth from one sequence, which needs no search, to the most, by the document's protocol."""
    table = times(kernels, SUMMED).query("part == 'table B'").set_index("n_seqs")
    need(table.columns, NEW, PACKAGES.new, "ropelab")
    most = table.index.max()
    grown = {
        words: table[name][most] / table[name][1] - 1
        for name, words in ((NEW, "every thread searches"), (PACKAGES.new, "one does"), ("ropelab", "none does"))
    }
    each = ", ".join(f"{by:+.1%} where {words}" for words, by in grown.items())
    return f"from 1 to {most:,} sequences the time grows by {each} (ropelab)", {
        "alone": table[PACKAGES.new][1] / table[NEW][1]
    }


@remark("TE-19", "te_kernels")
def both_conditions(kernels: pd.DataFrame) -> tuple[str, dict[str, object]]:
    table = choices(kernels)
    slower = missed(table, "first").query("part == 'table B'").n_seqs
    told = "; ".join(f"the {name} condition {missed_words(table, name)}" for name in ("first", "merged"))
    said = f"{told}; in table B the first condition takes the slower kernel for {listed(sorted(slower))} sequences"
    return said, {"missed": len(missed(table, "merged")), "packings": len(table)}


# ------------------------------------------------------------------------------------------------ studies: what rotates
# Both grids run as published, and as launch strategies of one kernel of ours. *legacy*: a block for every row of
# ``freqs`` and every sequence. *linear*: a block for every token, which searches for its sequence. Both launch the same
# rotation of a token, so the study compares the grids alone. This kernel is a model of TransformerEngine's kernel
# (`ropelab.bench.varlen_models`), and on purpose not the kernel of ropelab's functions. A strategy is how a block finds
# its token and its position. The kernel of ropelab finds neither. Its positions come from one small launch that all
# layers share, and its program takes a tile of tokens and heads. A block for each row of ``freqs`` cannot take a tile.
# With these grids the kernel of ropelab would show the loss of its tiles, not the cost of the grids. ``parity`` holds
# the results of the models and ropelab's to the bound of the definition in every case, and counts the elements with the
# same bits. Not all elements can have the same bits, because ropelab multiplies with cosines that were computed once,
# and a program of the models computes its own cosines.
Rotate = Callable[..., torch.Tensor]


@cache
def strategies() -> dict[str, Rotate]:
    """Our models of the two grids, which need Triton."""
    from ropelab.bench import varlen_models

    return {LEGACY: varlen_models.legacy_grid, LINEAR: varlen_models.token_linear}


def rotate_thd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    strategy: str | None = None,
    version: str = "first",
    interleaved: bool = False,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate packed tokens as TransformerEngine's fused path does, by one strategy in both directions.

    Args:
        t: ``[T, h, d]``, this rank's tokens; any strides.
        freqs: float32 ``[s2, 1, 1, d]`` angles; its length is a side of the legacy grid.
        cu_seqlens: int32 ``[n + 1]``, not sharded.
        strategy: ``"legacy"`` or ``"linear"``; by default the strategy that ``choose`` gives for ``version``.

    Returns:
        A new tensor, differentiable in ``t``.
    """
    from ropelab.bench.peers import differentiable

    angles = freqs[:, 0, 0].contiguous()
    if strategy is None:
        strategy = choose(len(cu_seqlens) - 1, len(angles), len(t), cp_size, version=version)
    where = {"start_positions": start_positions, "cp_size": cp_size, "cp_rank": cp_rank}
    kernel = partial(strategies()[strategy], angles=angles, cu_seqlens=cu_seqlens, interleaved=interleaved, **where)
    return differentiable(lambda x, inverse: kernel(x, inverse=inverse))(t, None)[0]


def rotation(name: str) -> Rotate:
    """The rotation of packed tokens by a contender: a function of ``t``, and of the keywords of `rotate_thd`.

    The keywords are freqs, cu_seqlens, interleaved, start_positions, cp_size and cp_rank.

    Raises:
        NotInstalled: the package, the library of the file, or a GPU is missing.
        ValueError: no contender has this name.
    """
    from ropelab.bench import peers
    from ropelab.bench.peers import te_library, te_source, transformer_engine

    if name in MODELS.names:
        return partial(rotate_thd, strategy=LINEAR if name == MODELS.new else LEGACY)
    context = nullcontext
    if name in CODE.names:
        library = te_source.library()
        context = partial(te_source.forced, name == CODE.new)
    elif name in PACKAGES.names:
        library = te_library.load(te_library.find(peers.BY_NAME[name].version))
    else:
        raise ValueError(f"name: expected one of {[pair.names for pair in PAIRS]}, got {name!r}")
    return partial(transformer_engine.apply_rotary_pos_emb, library, tensor_format="thd", context=context)


@cache
def runs(pair: Grids) -> bool:
    """Whether both contenders of a pair can run here."""
    try:
        for name in pair.names:
            rotation(name)
    except RuntimeError:  # `Unavailable` is one
        return False
    return True


# ------------------------------------------------------------------------------------------------- studies: the kernels
# Published kernels run where they can (`Grids`): the pull request's own file, compiled, and TransformerEngine 2.18 and
# 2.20. The times are for bf16 and split-half, as in the document. ``parity`` compares the bits for other dtypes, the
# interleaved layout and every rank; it and ``past_the_end`` also run in Triton's interpreter, with small sizes.


@dataclass(frozen=True)
class Scale:
    """The sizes of a run of ``kernels``: the sizes of the record, or small sizes to see that everything runs."""

    tokens: int
    heads: int
    head_dim: int
    rounds: int


FULL, SMOKE = Scale(TOKENS, 32, 128, rounds=5), Scale(2048, 4, 128, rounds=2)


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


def kernel_cases(tokens: int = TOKENS) -> list[Case]:
    """Every cell of ``kernels``.

    Three kinds of cells are not measured, for these reasons. With a full table for all packings, the legacy grid takes
    the time of its blocks. The kernel of flash-attn does not know context parallelism. Outside of table B, the old grid
    of the pull request's file runs in place of TransformerEngine 2.18 (see `contenders`).
    """
    own = (*CODE.names, *MODELS.names, "ropelab")
    both = {"steps": (GIVEN, SUMMED), "contenders": (*own, *PACKAGES.names, "flash_attn", INTEROP)}
    found = [Case("table B", remainder_last(n, tokens), tokens, **both) for n in N_SEQS]
    for n, parts in ((128, (64, 16, 4, 2)), (512, (16,)), (2401, (64, 16, 4, 2))):
        packing = balanced(n, tokens)
        lengths = [packing.longest, *(tokens // part for part in parts)]
        # Without an empty block, and so with the sum of the document's benchmark too: the grids differ by the search.
        searched = {packing.longest: (GIVEN, SUMMED)}
        found += [
            Case("freqs_len", packing, rows, steps=searched.get(rows, (GIVEN,)), contenders=own)
            for rows in sorted(set(lengths))
        ]
    for longest, counts in ((tokens // 2, (2, 4, 8, 16, 32, 63, 64, 128, 512, 2401)),
                            (tokens // 8, (9, 16, 32, 63, 64, 128, 512, 2401))):  # fmt: skip
        found += [Case("skew", skewed(n, longest, tokens), longest) for n in counts]
    for n in (128, 2401):
        packing = with_empty(n, tokens)
        found.append(Case("empty", packing, packing.longest))
    found.append(Case("empty", with_empty(128, tokens), tokens, contenders=own))
    for size in (2, 4, 8):
        for packing, rows, rank in (
            (balanced(128, tokens, 2 * size), tokens, 0),
            (balanced(128, tokens, 2 * size), tokens, size - 1),
            *((skewed(n, tokens // 2, tokens, 2 * size), tokens // 2, size - 1) for n in (2, 4, 8, 16, 64)),
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
        return measure_kernels(kernel_cases(), FULL, "cuda")
    few = [case for case in kernel_cases(SMOKE.tokens) if case.packing.n_seqs in (1, 8, 128) and case.cp_size in (1, 8)]
    return measure_kernels(few, SMOKE, "cuda")


def measure_kernels(chosen: Iterable[Case], scale: Scale, device: str, dtype=torch.bfloat16) -> pd.DataFrame:
    """The table of ``kernels`` for these cases."""
    from ropelab.bench import timing
    from ropelab.bench.operation import tidy

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
        from ropelab.bench.workloads import Workload

        tables = {"dtype": torch.float64, "device": device}
        self.cos, self.sin = rotary_table(rows, head_dim, **tables)
        self.layout = layout
        half = torch.outer(torch.arange(rows).float(), inverse_frequencies(head_dim, 10000.0).float()).to(device)
        self.freqs = pairing.join(half, half, layout)[:, None, None].contiguous()
        self._bounds = Workload("", 1, rows, 1, 0, head_dim, head_dim, layout=layout, seq_format="thd", lengths=(rows,))

    def of(self, x: torch.Tensor, positions: torch.Tensor, *, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The right result, and the largest error of each element; the error depends on the dtype of ``x``."""
        from ropelab.bench import peers

        options = {"layout": self.layout, "seq_format": "thd", "positions": positions, "inverse": inverse}
        expected = reference.rotate(x.detach(), self.cos, self.sin, **options)
        peer = peers.Peer("", None, own_tables=True)
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
    from ropelab.bench import timing

    exact = []
    if not timing.is_stopped():
        positions = case.packing.positions(case.cp_size, case.cp_rank).to(x.device)
        exact = [truth.of(source, positions, inverse=inverse) for inverse, source in ((False, x), (True, gradient))]
    right, status, results, same_bits = {}, {}, {}, {}
    partners = dict(pair.names for pair in PAIRS) | {pair.new: pair.old for pair in PAIRS}
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
                new = next(pair.new for pair in PAIRS if name in pair.names)
                same_bits[new] = all(map(torch.equal, found, results.pop(partners[name])))
            elif partners.get(name) in names:
                results[name] = found
        except Exception as error:  # a contender that cannot run is a result too
            status[name] = why_not(error)
    return right, status, same_bits


def why_not(error: Exception) -> str:
    """The status of a contender that raised."""
    from ropelab.bench import timing

    return f"not run: {error}" if isinstance(error, NotInstalled) else timing.failure(error)


def _bind(name: str, case: Case, truth: Truth, device) -> Rotate:
    """The rotation of one tensor by a contender. Tables and positions, which layers would share, are built here."""
    cu_seqlens = case.packing.cu_seqlens(device)
    freqs, shard = truth.freqs[: case.freqs_len], {"cp_size": case.cp_size, "cp_rank": case.cp_rank}
    if any(name in pair.names for pair in PAIRS):
        return partial(rotation(name), freqs=freqs, cu_seqlens=cu_seqlens, **shard)
    if name == INTEROP:
        return partial(apply_rotary_pos_emb, freqs=freqs, tensor_format="thd", cu_seqlens=cu_seqlens, **shard)
    cos, sin = (table[: case.freqs_len].float() for table in (truth.cos, truth.sin))
    if name == "ropelab":
        positions = PackedSequences(cu_seqlens, case.tokens, **shard).positions
        return partial(apply_rope, cos=cos, sin=sin, seq_format="thd", positions=positions)
    rotate = bind_peer(name, case.packing, cos, sin)
    return lambda x: rotate(x, None)[0]


def bind_peer(name: str, packing: Packing, cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """A package's rotation of packed tokens, ``rotate(q, k)``.

    Raises:
        NotInstalled: the package is not installed.
    """
    from ropelab.bench import peers
    from ropelab.bench.workloads import Workload

    found, missing = peers.available((peers.BY_NAME[name],))
    if missing:
        raise NotInstalled(missing[name].removeprefix("not run: "))
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
    pairs = [pair for pair in PAIRS if runs(pair)] if device == "cuda" else [MODELS]
    for layout in LAYOUTS:
        truth = Truth(tokens + 16, head_dim, device, layout)
        table = Truth(MANY_ROWS, head_dim, device, layout).freqs if PACKAGES in pairs else truth.freqs
        for dtype, (cp_size, cp_rank) in itertools.product(DTYPES[device], shards):
            multiple = 2 * cp_size if cp_size > 1 else 1
            for packing, past_end, with_starts in (
                (remainder_last(3, tokens, multiple), 0, False),
                (skewed(4, tokens // 2, tokens, multiple), 3, dtype == torch.float32),
                (with_empty(5, tokens, multiple), 3, False),
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
    from ropelab.bench import varlen_models

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


# ----------------------------------------------------------------------------------------------------- studies: a layer
# A plain pre-norm layer in torch, of table A's size, has two residual halves. The first half is LayerNorm, one
# projection to q, k and v, the rotation of q and k, causal attention within each sequence
# (``torch.nn.attention.varlen``) and the output projection. The second half is LayerNorm and two projections with GELU
# between. A layer of TransformerEngine differs: it fuses the norms into its GEMMs and runs other GEMMs.

RotatePair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LayerScale:
    """The sizes of a run of ``layer``, those of table A."""

    tokens: int = TOKENS
    hidden: int = 1536
    heads: int = 12
    ffn: int = 6144
    n_seqs: tuple[int, ...] = (128, 512, 1024, 2401)
    rounds: int = 3

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SMOKE_LAYER = LayerScale(tokens=1024, hidden=256, heads=2, ffn=512, n_seqs=(8,), rounds=2)


def layer(*, smoke: bool = False) -> pd.DataFrame:
    """Times of forward and backward of the layer, and of the rotation of its q and k alone.

    The layer runs with either grid, TransformerEngine, ropelab or no rotation. The sequences are balanced,
    ``freqs_len`` is the number of all tokens, the dtype is bf16, and the cotangent of the layer's result is random.

    Columns: what (the layer, or the rotation of its q and k alone), n_seqs, longest, tokens, freqs_len, contender,
        status, median_us, q20_us, q80_us, samples.
    """
    require_gpu()
    return measure_layer(SMOKE_LAYER if smoke else LayerScale(), "cuda")


def measure_layer(scale: LayerScale, device: str, dtype=torch.bfloat16) -> pd.DataFrame:
    """The table of ``layer`` for these sizes."""
    from ropelab.bench import timing
    from ropelab.bench.operation import tidy

    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    weights = Weights.drawn(scale, draw)
    x, gradient = draw(scale.tokens, scale.hidden).requires_grad_(), draw(scale.tokens, scale.hidden)
    truth = Truth(scale.tokens, scale.head_dim, device)
    frames = []
    for n in progress(scale.n_seqs, lambda n: f"{n} sequences"):
        packing = balanced(n, scale.tokens)
        rotations, status = pairs_of(packing, truth, device)
        attend = partial(attention, cu_seqlens=packing.cu_seqlens(device), longest=packing.longest)
        status |= {name: _pair_status(rotate, packing, truth, scale, draw) for name, rotate in rotations.items()}
        right = {name: rotate for name, rotate in rotations.items() if status[name] == "ok"}
        whole = {
            name: partial(_layer_calls, weights, x, gradient, rotate, attend, scale)
            for name, rotate in (right | {WITHOUT: lambda q, k: (q, k)}).items()
        }
        pair = [draw(scale.tokens, scale.heads, scale.head_dim).requires_grad_() for _ in range(2)]
        cotangents = [draw(scale.tokens, scale.heads, scale.head_dim) for _ in range(2)]
        alone = {name: partial(_alone_calls, pair, cotangents, rotate) for name, rotate in right.items()}
        for what, timed in ((LAYER, whole), (ALONE, alone)):
            frame = timing.gpu_times(timed, rounds=scale.rounds, graph_ms=1.0)
            columns = {"what": what, "n_seqs": n, "longest": packing.longest, "tokens": scale.tokens}
            lost = {name: outcome for name, outcome in status.items() if outcome != "ok"}
            frames.append(tidy(frame, columns | {"freqs_len": scale.tokens}, lost))
            if device == "cuda":
                torch.cuda.empty_cache()  # frees the memory of the graphs
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class Weights:
    """The weights of a layer, in the order of their use; all require grad."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, ...]

    @classmethod
    def drawn(cls, scale: LayerScale, draw: Callable[..., torch.Tensor]) -> Weights:
        h, ffn = scale.hidden, scale.ffn
        shapes = ((3 * h, h), (h, h), (ffn, h), (h, ffn))
        matrices = [(draw(shape) * shape[1] ** -0.5).requires_grad_() for shape in shapes]
        norms = tuple((draw(h) * 0.02 + 1).requires_grad_() for _ in range(2))
        return cls(*matrices, norms)

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.qkv, self.out, self.up, self.down, *self.norms)


def forward(
    weights: Weights, x: torch.Tensor, rotate: RotatePair, attend: Callable[..., torch.Tensor], scale: LayerScale
) -> torch.Tensor:
    """The layer, ``[T, hidden]`` -> ``[T, hidden]``. q, k and v are views of the result of one projection."""
    norm = partial(F.layer_norm, normalized_shape=(scale.hidden,))
    qkv = F.linear(norm(x, weight=weights.norms[0]), weights.qkv)
    q, k, v = qkv.view(scale.tokens, 3, scale.heads, scale.head_dim).unbind(1)
    x = x + F.linear(attend(*rotate(q, k), v).reshape(scale.tokens, scale.hidden), weights.out)
    return x + F.linear(F.gelu(F.linear(norm(x, weight=weights.norms[1]), weights.up)), weights.down)


def attention(q, k, v, *, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Causal attention within each sequence; its time grows with the sum of the squared lengths, not with T squared."""
    from torch.nn.attention.varlen import varlen_attn

    # torch up to 2.10 takes a flag for causal attention, and later versions take a window.
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **causal)


def pairs_of(packing: Packing, truth: Truth, device: str) -> tuple[dict[str, RotatePair], dict[str, str]]:
    """The rotations of q and k by contender, and contender -> status for the contenders that cannot run.

    The grids take q and k in a launch each, as TransformerEngine does; ropelab takes both at once. TransformerEngine
    2.18 and our models stand in for the pull request's file where it cannot be compiled.
    """
    cu_seqlens = packing.cu_seqlens(device)
    positions = PackedSequences(cu_seqlens, packing.tokens).positions
    cos, sin = truth.cos.float(), truth.sin.float()

    def by_grid(name: str) -> RotatePair:
        one = partial(rotation(name), freqs=truth.freqs, cu_seqlens=cu_seqlens)
        return lambda q, k: (one(q), one(k))

    found, missing = {}, {}
    for name in (*CODE.names, PACKAGES.new, *(() if runs(CODE) else (PACKAGES.old, *MODELS.names))):
        try:
            found[name] = by_grid(name)
        except Exception as error:  # a contender that cannot run is a result too
            missing[name] = why_not(error)
    ours = partial(apply_rope, cos=cos, sin=sin, seq_format="thd", positions=positions)
    return found | {"ropelab": ours}, missing


def _pair_status(rotate: RotatePair, packing: Packing, truth: Truth, scale: LayerScale, draw) -> str:
    """``"ok"`` if q, k and their gradients are right for views of a qkv buffer; unchecked with the clock stopped."""
    from ropelab.bench import timing

    if timing.is_stopped():
        return "ok"
    try:
        qkv = draw(scale.tokens, 3, scale.heads, scale.head_dim).requires_grad_()
        pair = qkv.unbind(1)[:2]
        results = rotate(*pair)
        cotangents = [draw(y.shape) for y in results]
        gradients = torch.autograd.grad(results, pair, cotangents)
        positions = packing.positions().to(qkv.device)
        error = max(
            worst(y, truth.of(x, positions, inverse=inverse))
            for inverse, ys, xs in ((False, results, pair), (True, gradients, cotangents))
            for y, x in zip(ys, xs, strict=True)
        )
        return "ok" if error <= 1 else f"wrong: {error:.3g} times its bound"
    except Exception as error:  # a contender that cannot run is a result too
        return why_not(error)


def _layer_calls(weights: Weights, x, gradient, rotate: RotatePair, attend, scale: LayerScale) -> list[Callable]:
    leaves = (x, *weights.all())
    return [lambda: torch.autograd.grad(forward(weights, x, rotate, attend, scale), leaves, gradient)]


def _alone_calls(pair, cotangents, rotate: RotatePair) -> list[Callable]:
    return [lambda: torch.autograd.grad(rotate(*pair), pair, cotangents)]


STUDIES: dict[str, Study] = {
    # The memory holds the right results and their bounds in float64, for x and its gradient: 65,536 x 32 x 128 each.
    "te_kernels": Study(kernels, gpu_gib=4, rows=71),
    "te_layer": Study(layer, gpu_gib=10, rows=8),
    "te_parity": Study(parity, gpu_gib=1, timed=False),
    "te_past_the_end": Study(past_the_end, gpu_gib=1, rows=1, timed=False),
}
"""The name of a record -> the study that measures it."""
