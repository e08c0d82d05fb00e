"""The evidence for claims TE-01 to TE-21 that a CPU computes in seconds."""

import os
import re

import pandas as pd

from ropelab.bench import replaced
from ropelab.bench.records import ROOT
from ropelab.interop.transformer_engine import LEGACY, LINEAR
from ropelab.study.documents.transformer_engine import packings
from ropelab.study.documents.transformer_engine.dispatch import choose
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.sources import cases, facts, where

DOCUMENTS = ROOT / "data" / "documents"
THREADS, WARP = 256, 32
"""The threads of a block and of a warp. The reads of one address by a warp are one request."""


@evidence("te_published_a", "the document's table of layers")
def published_a() -> pd.DataFrame:
    """The document's table A, with the ratio that follows from its milliseconds."""
    frame = pd.read_csv(DOCUMENTS / "transformer_engine_3057_a.csv")
    return frame.assign(speedup=frame.old_ms / frame.new_ms)


@evidence("te_published_b", "the document's table of kernels")
def published_b() -> pd.DataFrame:
    """The document's table B, with the ratio, the dead blocks, and the nanoseconds of a dead block in a pass.

    A pass is a forward or a backward. The nanoseconds follow from the difference of the kernels, because all other
    costs of a block are in the new kernel too.
    """
    frame = pd.read_csv(DOCUMENTS / "transformer_engine_3057_b.csv")
    dead = packings.TOKENS * (frame.n_seqs - 1)
    ns = (frame.old_ms - frame.new_ms) * 1e6 / (2 * dead.where(dead > 0))
    return frame.assign(speedup=frame.old_ms / frame.new_ms, dead_blocks=dead, ns_per_dead_block=ns)


@evidence("te_search", "counted on the CPU")
def search() -> pd.DataFrame:
    """The reads of ``cu_seqlens`` by the search of a block, for as many sequences as in table B.

    Columns: n_seqs, steps (the most that a token needs), thread_reads (steps of all threads), warp_requests.
    """
    rows = []
    for n in packings.N_SEQS:
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
    for fact in map(_dispatch, facts("dispatch", "transformer_engine")):
        variable, forced = fact.get("variable", ""), fact.get("forces", {})
        same = []
        for value, strategy in forced.items():
            with replaced.entries(os.environ, {variable: value}):
                chosen = [choose(n, packings.TOKENS, packings.TOKENS, version=fact["version"]) for n in packings.N_SEQS]
            same.append(set(chosen) == {strategy})
        condition = ("least_sequences", "blocks_per_token", "more_than", "times_cp_size")
        rows.append({
            "version": fact["version"], "read": where(fact), "variable": variable, "zero": forced.get("0", ""),
            "one": forced.get("1", ""), "model": all(same), **{name: fact[name] for name in condition},
            "least_dead_blocks": fact.get("least_dead_blocks", 0), "no_tokens": fact.get("no_tokens", ""),
            "guard": fact["guard"], "threads": fact["threads_that_search"], "blocks": fact.get("blocks", ""),
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
