"""The kernel family's bars, figures and tables, on records made up here: no number below was measured."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("seaborn")

from ropelab.bench import records  # noqa: E402
from ropelab.bench.names import (
    NO_GRAD,
    PREFIX,  # noqa: E402
    RECORDED,
)
from ropelab.bench.peers import TRANSFORMER_ENGINE  # noqa: E402
from ropelab.bench.workloads import DENSE_CELLS, DIRECTIONS, Workload  # noqa: E402
from ropelab.layout.pairing import LAYOUTS  # noqa: E402
from ropelab.study.site import summary  # noqa: E402
from ropelab.study.topics.kernel_steps.chapter import noisy
from ropelab.study.topics.performance import comparison  # noqa: E402
from ropelab.study.topics.performance import findings as family_findings  # noqa: E402
from ropelab.study.topics.performance.findings import MANY, ONE, READS_TWICE, SKEWED  # noqa: E402

SPEED = {
    "ropelab": 0.97, "ropelab in place": 0.98, "hf_eager": 0.07, "hf_compiled": 0.7, "complex": 0.1,
    "torchembed 0.3.2": 0.2, "liger": 0.93, "flash_attn": 0.85,
}  # fmt: skip
CASES = {
    ONE: (1, 65536), "n=8": (8, 8192), "n=128": (128, 512), "n=1024": (1024, 64), MANY: (2401, 28),
    SKEWED: (2401, 34336),
}  # fmt: skip
PACKED = {
    "ropelab": lambda n, longest: 270,
    "ropelab with positions": lambda n, longest: 274,
    "flash_attn": lambda n, longest: 99_000 if n * longest > 1e6 else 265,
    READS_TWICE: lambda n, longest: 560 + n / 100,
    TRANSFORMER_ENGINE.name: lambda n, longest: 560 + n / 100,
    "legacy grid": lambda n, longest: 500 + 0.0006 * n * (longest if n * longest > 1e6 else 65536),
}
STUDIES = "dense", "formats", "few_tokens", "packed", "qk_norm", "host", "memory"


def variants(workload: Workload) -> list[Workload]:
    """Both layouts, forward and backward."""
    return [
        Workload(**vars(workload) | {"layout": layout, "direction": direction})
        for layout in LAYOUTS for direction in DIRECTIONS
    ]  # fmt: skip


class Made:
    """Tables with the columns of the records; ``spread`` varies every time by up to that share."""

    def __init__(self, spread: float = 0.01):
        self.rng, self.spread = np.random.default_rng(0), spread

    def row(self, contender: str, median: float, copy_us: float) -> dict:
        median *= self.rng.uniform(1, 1 + self.spread)
        return {
            "contender": contender, "status": "ok", "median_us": median, "q20_us": 0.99 * median,
            "q80_us": 1.02 * median, "samples": 20, "fraction_of_copy": copy_us / median,
        }  # fmt: skip

    def compared(self, workload: Workload, speed: dict[str, float], **more) -> list[dict]:
        copy_us = workload.bytes / 4.2e6 + 1
        names = [name for name in speed if name != "liger" or workload.layout == "split_half"]
        rows = [self.row(name, copy_us / speed[name], copy_us) for name in names]
        rows.append(self.row(f"{PREFIX}copy_", copy_us, copy_us) | {"median_us": copy_us, "fraction_of_copy": 1.0})
        in_place = [{"in_place": row["contender"] in ("liger", "ropelab in place")} for row in rows]
        return [workload.columns | row | flag | more for row, flag in zip(rows, in_place, strict=True)]

    def dense(self) -> pd.DataFrame:
        rows = [self.compared(v, SPEED, bar=cell.bar) for cell in DENSE_CELLS for v in variants(cell.workload)]
        return pd.DataFrame(itertools.chain(*rows))

    def formats(self) -> pd.DataFrame:
        rows = []
        for cell, storage in itertools.product(DENSE_CELLS, ("sbhd", "bhsd", "qkv")):
            for variant in variants(cell.workload):
                variant = Workload(**vars(variant) | {"seq_format": "bshd" if storage == "qkv" else storage})
                where = {"storage": "qkv" if storage == "qkv" else "contiguous", "bar": 0.95}
                rows += self.compared(variant, SPEED, **where)
        return pd.DataFrame(rows)

    def few_tokens(self) -> pd.DataFrame:
        rows = []
        for tokens, layout, direction in itertools.product((1, 2, 4, 8), LAYOUTS, DIRECTIONS):
            name = f"1x{tokens} 32/8 128"
            workload = Workload(name, 1, tokens, 32, 8, 128, 128, layout=layout, direction=direction)
            rows += self.compared(workload, SPEED | {"ropelab": 0.9}, storage="contiguous", bar=1 / 1.2)
        return pd.DataFrame(rows)

    def packed(self) -> pd.DataFrame:
        rows = []
        for (case, (n, longest)), layout, direction in itertools.product(CASES.items(), LAYOUTS, DIRECTIONS):
            identity = {
                "case": case, "n_seqs": n, "longest": longest, "tokens": 65536, "heads": 32, "head_dim": 128,
                "dtype": "bfloat16", "layout": layout, "direction": direction, "bytes": 2 * 65536 * 32 * 128 * 2,
            }  # fmt: skip
            for name, time in PACKED.items():
                if name != "ropelab with positions" or direction == "forward":
                    length = {"freqs_len": (longest if case == SKEWED else 65536) if name == "legacy grid" else np.nan}
                    rows.append(identity | self.row(name, time(n, longest), 264) | length)
            rows.append(identity | self.row(f"{PREFIX}copy_", 264, 264))
        return pd.DataFrame(rows)

    def qk_norm(self) -> pd.DataFrame:
        rows = []
        speeds = {
            "ropelab": (0.94, 0.6, 0.37), "compiled separate": (0.45, 0.3, 0.2),
            "compiled together": (0.7, 0.32, 0.15), "eager separate": (0.05, 0.03, 0.02),
        }  # fmt: skip
        for cell, layout in itertools.product(DENSE_CELLS[:4], LAYOUTS):
            shape = Workload(**vars(cell.workload) | {"layout": layout})
            copy_us = shape.bytes / 4.2e6 + 1
            identity = {k: v for k, v in shape.columns.items() if k not in ("rotary_dim", "seq_format", "direction")}
            for i, step in enumerate(("forward", "backward", "forward and backward")):
                for name, fractions in speeds.items():
                    rows.append(identity | {"step": step} | self.row(name, copy_us / fractions[i], copy_us))
                rows.append(identity | {"step": step} | self.row(f"{PREFIX}copy_", copy_us, copy_us))
        return pd.DataFrame(rows)

    def host(self) -> pd.DataFrame:
        times = {
            "ropelab": 14, "ropelab in place": 12, "hf_eager": 90, "hf_compiled": 60, "liger": 33, "flash_attn": 210,
            "vllm": 11,
        }  # fmt: skip
        rows = []
        for layout, autograd, name in itertools.product(LAYOUTS, (False, True), times):
            if name != "liger" or layout == "split_half":
                workload = Workload("8x1 32/8 128", 8, 1, 32, 8, 128, 128, layout=layout)
                of = {"autograd": autograd, "call": RECORDED if autograd else NO_GRAD}
                rows.append(workload.columns | self.row(name, times[name] + 12 * autograd, 1) | of)
        return pd.DataFrame(rows).drop(columns="fraction_of_copy")

    def memory(self) -> pd.DataFrame:
        result = 2 * 4096 * 40 * 128
        beyond = {
            "ropelab apply_rope": 0, "ropelab apply_qk_norm_rope": 1024, "liger": 2 * 2**20, "flash_attn": 0,
            "hf_eager": 3 * result,
        }  # fmt: skip
        return pd.DataFrame(
            {
                "contender": name,
                "step": step,
                "status": "ok",
                "peak_bytes": n * result + more,
                "result_bytes": n * result,
            }
            for name, more in beyond.items()
            for step, n in (("forward", 1), ("forward and backward", 2))
        )

    def write(self, directory, studies=STUDIES):
        for study in studies:
            records.write(study, getattr(self, study)(), directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    Made().write(folder)
    return folder


def test_nothing_measured_is_no_success(tmp_path):
    board = family_findings.scoreboard(tmp_path)
    assert set(board.verdict) == {"not measured"} and list(board.question) == list(family_findings.QUESTIONS)
    assert all("`make measure ONLY=" in reason for reason in board.measured)


# ------------------------------------------------------------------------------------------------------- the bars


def question_bars(question: str, tables: dict[str, pd.DataFrame]) -> list[family_findings.Bar]:
    studies, function = family_findings.QUESTIONS[question]
    return function(*(tables[study] for study in studies))


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """Records in which every bar is met, without noise."""
    return {study: getattr(Made(spread=0), study)() for study in STUDIES}


def test_every_bar_is_there_and_can_be_met(tables):
    found = [bar for question in family_findings.QUESTIONS for bar in question_bars(question, tables)]
    assert len(found) == 4 + 4 + 1 + 5 + 2 + 2 and all(bar.met for bar in found)
    # 8 cells, 6 packings, 4 counts of tokens; 2 layouts and directions. Host: Liger has one layout. Norm: 4 cells.
    assert [bar.cases for bar in found] == [32] * 4 + [4, 4, 24, 24] + [16] + [1, 1, 2, 2, 2] + [8, 8] + [2, 2]


SPOILED = {
    "of a copy in bshd": ("Every dense format", "dense", 1.05, 0),
    "of a copy in sbhd": ("Every dense format", "formats", 1.05, 0),
    "of a copy in qkv": ("Every dense format", "formats", 1.05, -1),
    "times as long for 2,401 sequences as for one": ("Packed sequences", "packed", 1.04, f"case == {MANY!r}"),
    "times as long for one long and 2,400 short sequences as for one": (
        "Packed sequences", "packed", 1.04, f"case == {SKEWED!r}",
    ),  # fmt: skip
    "times as fast as TransformerEngine 2.20": ("Packed sequences", "packed", 1.04, "case == 'n=8'"),
    "times as long as a copy, 1 to 8 tokens": ("Few tokens, GPU", "few_tokens", 1.1, 3),
    "of Liger's host time without autograd": ("Few tokens, host", "host", 1.3, "not autograd"),
    "of Liger's host time with autograd": ("Few tokens, host", "host", 1.5, "autograd"),
    "times vLLM's host time in place": ("Few tokens, host", "host", 1.3, "not autograd"),
    "times vLLM's host time into new tensors": ("Few tokens, host", "host", 1.6, "not autograd"),
    "times vLLM's host time with autograd": ("Few tokens, host", "host", 1.3, "autograd"),
    "of a copy in forward": ("QK norm and rotation", "qk_norm", 1.1, "step == 'forward'"),
    "times as fast as norm and rotation compiled, forward plus backward": (
        "QK norm and rotation", "qk_norm", 1.3, "step == 'forward and backward'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
@pytest.mark.parametrize("how", ["slow", "wrong"])
def test_every_bar_can_be_missed(what, how, tables):
    """One slow case misses a bar, and so does one case without a right result."""
    question, study, factor, rows = SPOILED[what]
    frame = tables[study]
    ours = frame[frame.contender == ("ropelab in place" if "in place" in what else "ropelab")]
    chosen = (ours.query(rows) if isinstance(rows, str) else ours.iloc[[rows]]).index
    if how == "slow":
        frame.loc[chosen, "median_us"] *= factor
        if "fraction_of_copy" in frame:
            frame.loc[chosen, "fraction_of_copy"] /= factor
    else:
        frame.loc[chosen, "status"] = "wrong: result has relative error 0.3"
    (bar,) = [bar for bar in question_bars(question, tables) if bar.what == what]
    assert not bar.met and bar.missed <= len(chosen)
    assert "missed" in bar.verdict and (bar.number == "nothing") == (how == "wrong")


def test_memory_beyond_the_results_is_a_tensor(tables):
    memory = tables["memory"]
    ours = memory[memory.contender == "ropelab apply_qk_norm_rope"].index
    memory.loc[ours[1], "peak_bytes"] += 2560  # together 3,584: more than six roundings
    rotation, norm = family_findings.memory_bars(memory)
    assert rotation.met and not norm.met
    assert norm.what == "bytes beyond the results of ropelab apply_qk_norm_rope"
    assert (norm.number, norm.asked, norm.verdict) == ("3,584", "at most 3,072", "missed in 1 of 2")
    assert norm.where == "forward and backward"


def test_rounding_lifts_nothing_over_a_bar(tables):
    dense = tables["dense"]
    row = dense[dense.contender == "ropelab"].index[5]
    dense.loc[row, "fraction_of_copy"] = 0.94999
    bar = family_findings.format_bars(dense, tables["formats"])[0]
    assert (bar.number, bar.what, bar.verdict) == ("0.949", "of a copy in bshd", "missed in 1 of 32")
    assert bar.where == "1x4096 32/8 128, split_half, backward"
    for value, at_least, text in ((0.95, True, "0.950"), (1.03, False, "1.030"), (1.03001, False, "1.031")):
        assert family_findings.toward_worse(value, at_least=at_least) == text
    assert [family_findings.toward_worse(value, at_least=False) for value in (0.0, 1024.0)] == ["0", "1,024"]


def test_the_noise_of_a_time_covers_its_samples():
    rows = pd.DataFrame({"contender": "x", "status": "ok", "median_us": [10.0, 20.0], "q20_us": [9.0, 19.0],
                         "q80_us": [12.0, 25.0], "fraction_of_copy": [1.0, 0.5], "cell": "a"})  # fmt: skip
    times = noisy("dense", rows)
    assert np.allclose(times[["low", "high"]].mul(times.median_us, axis=0), [(9, 12), (19, 25)])


# --------------------------------------------------------------------------------------------- tables, older figures


def test_smallest_fractions_keep_the_order_and_what_is_not_offered(tables):
    formats = tables["formats"]
    formats = formats[(formats.contender != "liger") | (formats.storage != "qkv")]
    smallest = family_findings.smallest_fractions(tables["dense"], formats)
    assert list(smallest.index)[:2] == [("bshd", "4x4096 32/8 128"), ("bshd", "1x4096 32/8 128")]
    assert smallest.index.get_level_values("format").unique().tolist() == list(family_findings.FORMATS)
    assert smallest.liger["qkv"].isna().all() and np.allclose(smallest.ropelab, 0.97, rtol=1e-12)
    assert not any(name.startswith(PREFIX) for name in smallest)


def test_the_readme_table_says_what_is_missing(tmp_path, directory):
    Made().write(tmp_path, ["dense", "packed"])
    lacking = [summary.family(where).rstrip().rpartition("\n")[2] for where in (tmp_path, directory)]
    for study in STUDIES:
        assert [re.search(rf"\b{study}\b", line) is not None for line in lacking] == [
            study not in ("dense", "packed"), False
        ]  # fmt: skip


def test_formats_in_one_record_do_not_mix(tables):
    names = comparison.named_cells(tables["formats"])
    assert {"8x1 32/8 128, sbhd", "8x1 32/8 128, bhsd", "8x1 32/8 128, qkv"} <= set(names)
    assert comparison.named_cells(tables["dense"]).equals(tables["dense"].cell)
