"""fairseq2#1213: both layouts in ``RotaryEncoder`` and in ``ReferenceRotaryEncoder``, and which should be the default.

``data/claims/fairseq2.toml`` has the claims, their tests and the tables of the document, and the notebook
``12_fairseq2`` asks the records. Here stands the rest, in this order: fairseq2's own code, the evidence that a CPU
computes, the rules that are more than a comparison with their remarks, and the studies, which measure the records on a
GPU. Judging imports nothing that measures, so a study imports the timer where it takes a time.

The document states neither dtype nor direction. Here "forward" is a call without autograd, "forward and backward" one
with it. float32, forward, is the document's: the names of its kernels have no cast, and it speaks of ``forward(...)``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import io
import math
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from ropelab import reference, rotary_table
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import packages, replaced
from ropelab.bench.cells import progress
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.rows import is_right, timed
from ropelab.bench.study import Study
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.fairseq2 import LAYOUTS, KernelRotaryEncoder, SeqsLayout
from ropelab.layout.pairing import join, pairs, permutation
from ropelab.study.engine import noise
from ropelab.study.engine.claims import CLAIMS, TABLES, Claim
from ropelab.study.engine.comparisons import DOCUMENT, Comparison
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.judging import above, counted, needed, printed, size
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.noise import exact
from ropelab.study.engine.sources import cases, facts
from ropelab.study.engine.verdict import Untold, Verdict, fact, untold
from ropelab.study.engine.words import value_range

PUBLISHED = tomllib.loads((CLAIMS / "fairseq2.toml").read_text(encoding="utf-8"))["published"]
"""The figures that the document's text states, by name."""
CLASSES = {"RE": "RotaryEncoder", "RRE": "ReferenceRotaryEncoder"}
IMPLEMENTATIONS = ("RE llama", "RRE llama", "RE reference", "RRE reference")
"""The document's four columns: class and ``impl``."""
DIRECTIONS = ("forward", "forward and backward")
OWN = ("float32", "forward")
"""The dtype and the direction of the document."""
SHAPE = ["batch", "seq_len", "encoding_dim"]
LARGE = 2**27
"""The features from which a shape of the log is large."""


# ------------------------------------------------------------------------------------------------- fairseq2's code
# Both versions are pure Python. ``fairseq2/__init__.py`` imports the native library fairseq2n, and
# ``fairseq2/nn/__init__.py`` every module of ``fairseq2.nn``. So neither file is executed. An empty module, which only
# says where the files of the package are, takes the place of each. Every other module is executed as published.

REPOSITORY = "facebookresearch/fairseq2"
COMMIT = "eb69a67ca78cdea45688e2515b2491bbf2e8aa00"
"""The head of the pull request."""
ENCODERS = "nn/_position_encoder"
"""The file that the pull request changes."""
NEEDED = ("data_type", "device", "typing", "ops/__init__", "ops/_shape", "utils/tensor", "nn/_batch_layout",
          "nn/_incremental_state")  # fmt: skip
"""The other files of the commit that `ENCODERS` needs. They import nothing outside this list but torch."""
_NOT_EXECUTED = ("fairseq2", "fairseq2.nn", "fairseq2.nn.utils", "fairseq2.utils", "fairseq2.models",
                 "fairseq2.models.olmo")  # fmt: skip


@dataclass(frozen=True)
class Fairseq2:
    """The classes of one version of fairseq2.

    Attributes:
        source: the name of the code in the records (column ``encoder_code``): the version, and the first 12 hexadecimal
            digits of the checksum of the file with the encoders.
        modules: the name of each module, without "fairseq2." -> the module.
    """

    source: str
    modules: Mapping[str, ModuleType]

    def __getattr__(self, name: str) -> type:
        """The class of that name, such as ``RotaryEncoder``, ``BatchLayout`` or ``IncrementalStateBag``."""
        for module in self.modules.values():
            if name in vars(module) and vars(module)[name].__module__ == module.__name__:
                return vars(module)[name]
        raise AttributeError(f"{self.source}: no class {name}")


@cache
def proposed() -> Fairseq2:
    """The code of the pull request.

    Raises:
        ropelab.bench.packages.NotInstalled: a file of the commit is not under ``build/peers``.
    """
    file, *_ = (packages.file_at(REPOSITORY, COMMIT, f"src/fairseq2/{name}.py") for name in (ENCODERS, *NEEDED))
    names = "nn._position_encoder", "nn._batch_layout", "nn._incremental_state"
    return _loaded(COMMIT[:9], file.parents[2], file, *names)


@cache
def released() -> Fairseq2:
    """The newest release, which has both encoders without ``impl``, ``DualRotaryEncoder`` and ``YaRNRotaryEncoder``.

    Raises:
        ropelab.bench.packages.NotInstalled: fairseq2 is not under ``build/peers``.
    """
    version, directory = packages.locate("fairseq2")
    names = "nn.position_encoder", "nn.batch_layout", "nn.incremental_state", "models.olmo.yarn_rope"
    return _loaded(version, directory, directory / "fairseq2" / "nn" / "position_encoder.py", *names)


def _loaded(version: str, directory: Path, encoders: Path, *names: str) -> Fairseq2:
    """Execute the modules of these names, and of the modules that they import, from the files of one version.

    The modules are imported as ``fairseq2.…``, and then named after the version: torch.compile imports the module of
    every function that it inlines by the module's name, and several versions must not share a name.
    """
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fairseq2"}
    stand_ins = {name: ModuleType(name) for name in _NOT_EXECUTED}
    for name, module in stand_ins.items():
        module.__path__ = [str(directory.joinpath(*name.split(".")))]
    with replaced.entries(sys.modules, stand_ins):
        found = {}
        for name in names:
            found[name] = importlib.import_module(f"fairseq2.{name}")
            # models.olmo.yarn_rope imports these classes from fairseq2.nn, whose own file would gather them.
            stand_ins["fairseq2.nn"].__dict__.update(_definitions(found[name]))
        executed = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fairseq2"}
    sys.modules.update(others)
    prefix = f"_ropelab_peer_fairseq2_{version}".replace(".", "_")
    for name, module in executed.items():
        module.__name__ = prefix + name.removeprefix("fairseq2")
        sys.modules[module.__name__] = module
        for definition in _definitions(module, name).values():
            definition.__module__ = module.__name__
    digest = hashlib.sha256(encoders.read_bytes()).hexdigest()[:12]
    return Fairseq2(f"fairseq2 {version}, sha256 {digest}", found)


def _definitions(module: ModuleType, name: str | None = None) -> dict[str, Any]:
    """The classes and functions that the file of a module defines, by name."""
    name = name or module.__name__
    return {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}


# ------------------------------------------------------------------------------------------- evidence, on the CPU


@evidence("fairseq2_summary", "recomputed from the document's log")
def summary() -> pd.DataFrame:
    """The means that the document prints, beside the means that follow from its log.

    Columns: mode, ratio, printed, of_ratios (the mean of the log's own ratios, which are rounded less), of_times (the
        mean of the ratios of the printed milliseconds), of_inverses, of_large_inverses (the geometric mean of the
        inverses of the log's ratios, over all shapes and over those of at least `LARGE` features).
    """
    log, stated = (pd.read_csv(TABLES / f"fairseq2_1213_{name}.csv") for name in ("log", "summary"))
    stated, rows = stated.set_index(["figure", "mode"]).value, []
    for ratio, (mode, cells) in product(("llama", "reference"), log.groupby("mode")):
        found, times = cells[f"stated_rre_over_re_{ratio}"], cells[f"rre_{ratio}_ms"] / cells[f"re_{ratio}_ms"]
        large = cells[SHAPE].prod(axis=1) >= LARGE
        rows.append({
            "mode": mode, "ratio": ratio, "printed": stated[f"mean RRE/RE {ratio}", mode],
            "of_ratios": found.mean(), "of_times": times.mean(),
            "of_inverses": _geometric(1 / found), "of_large_inverses": _geometric(1 / found[large]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _geometric(values: pd.Series) -> float:
    """The geometric mean, whose reciprocal is that of the reciprocals."""
    return float(np.exp(np.log(values).mean()))


POSITIONS = (2048, 4096, 16384)
_TABLES = {
    # The cosines and sines in the rows after the row for padding, with a column for each pair.
    "RE": lambda e: (e.freqs[1:, :, 0], e.freqs[1:, :, 1]),
    "RRE": lambda e: tuple(t[1:, : e.encoding_dim // 2] for t in (e.cos_freqs, e.sin_freqs)),
    "kernel": lambda e: (e.cos, e.sin),
}


@evidence("fairseq2_equality", "computed on the CPU with the pull request's own encoders")
def equality(*, smoke: bool = False) -> pd.DataFrame:
    """Whether the pull request's encoders, and ropelab's kernel, compute the same.

    Columns: what, first, second, layout, direction, positions, equal, difference (largest, absolute), encoder_code. The
    column what has three values:

    - "formula": tables and inputs are small integers, for which float32 is exact. A rotation is linear in its input and
      in its tables. So two rotations that agree on random integers are the same polynomial, but for an accident.
    - "permutation": ``impl="reference"`` of x against ``impl="llama"`` of the reordered x, reordered back. The bits are
      compared.
    - "tables": the tables that each encoder makes, for positions below ``positions``. They are compared with float64
      tables (``second`` is "exact") and with one another.
    """
    code = proposed()
    classes = {name: getattr(code, of) for name, of in CLASSES.items()} | {"kernel": KernelRotaryEncoder}
    frame = pd.DataFrame([*_formulas(code, classes), *_permutations(code, classes), *_tables(classes)])
    frame = frame.astype({"positions": "Int64"}).assign(encoder_code=code.source)
    frame.attrs["source"] = f"computed on the CPU with {code.source}"
    return frame


def _formulas(code: Fairseq2, classes: Mapping[str, type]) -> Iterator[dict]:
    generator = torch.Generator().manual_seed(0)
    seqs, cotangent = (torch.randint(-64, 65, (3, 7, 2, 16), generator=generator).float() for _ in range(2))
    cos, sin = (torch.randint(-8, 9, (7, 8), generator=generator).float() for _ in range(2))
    for impl, layout in LAYOUTS.items():
        encoders = {name: encoder_class(16, 7, impl=impl) for name, encoder_class in classes.items()}
        encoders["RE"].freqs[1:] = torch.stack((cos, sin), dim=-1)
        encoders["RRE"].cos_freqs[1:], encoders["RRE"].sin_freqs[1:] = (join(t, t, layout) for t in (cos, sin))
        encoders["kernel"].cos, encoders["kernel"].sin = cos, sin
        results = {name: _both_directions(code, encoder, seqs, cotangent) for name, encoder in encoders.items()}
        for other in ("RRE", "kernel"):
            for direction, first, second in zip(("forward", "backward"), results["RE"], results[other], strict=True):
                yield _compared("formula", "RE", other, first, second, layout=layout, direction=direction)


def _permutations(code: Fairseq2, classes: Mapping[str, type]) -> Iterator[dict]:
    generator = torch.Generator().manual_seed(1)
    seqs, cotangent = (torch.randn(3, 7, 2, 16, generator=generator) for _ in range(2))
    to_pairs, to_halves = (
        permutation(16, *names) for names in (("split_half", "interleaved"), ("interleaved", "split_half"))
    )
    for name, encoder_class in classes.items():
        halves = _both_directions(code, encoder_class(16, 7, impl="reference"), seqs, cotangent)
        adjacent = encoder_class(16, 7, impl="llama")
        ordered = _both_directions(code, adjacent, seqs[..., to_pairs], cotangent[..., to_pairs])
        for direction, first, second in zip(("forward", "backward"), halves, ordered, strict=True):
            what = f"{name} reference", f"{name} llama"
            yield _compared("permutation", *what, first, second[..., to_halves], direction=direction)


def _tables(classes: Mapping[str, type], encoding_dim: int = 256) -> Iterator[dict]:
    most = max(POSITIONS)
    found = {name: _TABLES[name](c(encoding_dim, most, impl="reference")) for name, c in classes.items()}
    found["exact"] = rotary_table(most, encoding_dim, dtype=torch.float64)
    for first, second in (("RE", "exact"), ("RRE", "exact"), ("kernel", "exact"), ("RE", "RRE")):
        for positions in POSITIONS:
            tables = (torch.cat([t[:positions] for t in found[name]]) for name in (first, second))
            yield _compared("tables", first, second, *tables, positions=positions)


def _both_directions(
    code: Fairseq2, encoder: Callable, seqs: torch.Tensor, cotangent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = seqs.clone().requires_grad_()
    result = encoder(leaf, code.BatchLayout(seqs.shape[:2], None))
    return result.detach(), torch.autograd.grad(result, leaf, cotangent)[0]


def _compared(what: str, first: str, second: str, a: torch.Tensor, b: torch.Tensor, **where) -> dict:
    return {
        "what": what, "first": first, "second": second, **where,
        "equal": torch.equal(a, b), "difference": (a.double() - b.double()).abs().max().item(),
    }  # fmt: skip


@evidence("fairseq2_defaults", "computed on the CPU with released fairseq2")
def defaults(*, smoke: bool = False) -> pd.DataFrame:
    """The bits of the pull request's encoders without ``impl`` against those of released fairseq2, which has none.

    The columns are encoder, case, equal and encoder_code. The cases are the ways to be called, the buffers, and the
    signature.
    """
    code, before, rows = proposed(), released(), []
    for name in CLASSES.values():
        pair = getattr(code, name), getattr(before, name)
        new, old = (made(16, 32) for made in pair)
        for case, seqs, layouts, training, step in _ways_to_call(code.BatchLayout, before.BatchLayout):
            bag = None if step is None else SimpleNamespace(step_nr=step)
            outputs = [
                e.train(training)(seqs, layout, state_bag=bag) for e, layout in zip((new, old), layouts, strict=True)
            ]
            same = outputs[0].dtype == outputs[1].dtype and torch.equal(*outputs)
            rows.append({"encoder": name, "case": case, "equal": same})
        kept, were = (dict(e.named_buffers()) for e in (new, old))
        whole = {
            "names and contents of the buffers": kept.keys() == were.keys()
            and all(torch.equal(kept[n], tensor) for n, tensor in were.items()),
            "keys of a checkpoint": new.state_dict().keys() == old.state_dict().keys(),
            "signature": _callable_as_before(*pair),
        }
        rows += [{"encoder": name, "case": case, "equal": same} for case, same in whole.items()]
    frame = pd.DataFrame(rows).assign(encoder_code=code.source)
    frame.attrs["source"] = f"computed on the CPU: {code.source} against {before.source}"
    return frame


def _ways_to_call(*batch_layouts: type) -> Iterator[tuple[str, torch.Tensor, list[Any], bool, int | None]]:
    """Case, seqs, a layout of each class, whether it is training, and tokens decoded before (None: no state bag)."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    dense, padded = ([made((3, 7), lengths) for made in batch_layouts] for lengths in (None, [7, 2, 5]))
    packed = [made((9,), [4, 3], packed=True) for made in batch_layouts]
    yield "[N, S, E]", draw(3, 7, 16), dense, True, None
    yield "[N, S, H, E]", draw(3, 7, 2, 16), dense, True, None
    yield "[N, S, G, H, E]", draw(3, 7, 2, 3, 16), dense, True, None
    yield "float16", draw(3, 7, 2, 16, dtype=torch.float16), dense, True, None
    yield "bfloat16", draw(3, 7, 2, 16, dtype=torch.bfloat16), dense, True, None
    yield "float64", draw(3, 7, 2, 16, dtype=torch.float64), dense, True, None
    yield "padded", draw(3, 7, 2, 16), padded, True, None
    yield "packed, with padding", draw(9, 2, 16), packed, True, None
    yield "decoding", draw(3, 7, 2, 16), dense, False, 5
    yield "decoding, padded", draw(3, 7, 2, 16), padded, False, 5
    yield "a state bag while training", draw(3, 7, 2, 16), dense, True, 5


def _callable_as_before(new: type, old: type) -> bool:
    """Whether every way to call ``old`` is a way to call ``new``, and means the same."""
    before, after = (inspect.signature(c).parameters for c in (old, new))
    kept = all(n in after and (after[n].kind, after[n].default) == (p.kind, p.default) for n, p in before.items())
    added = [p for n, p in after.items() if n not in before]
    return kept and all(p.kind == p.KEYWORD_ONLY and p.default is not p.empty for p in added)


# ------------------------------------------------------------------------------------------------ rules and remarks

PASSES = {"forward": 1, "forward and backward": 2}


def _reordering(inductor: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """RE compiled in pairs and in halves, by dtype and direction."""
    compiled = timed(inductor)
    compiled = compiled[compiled["mode"] == "compiled"].set_index(["dtype", "direction"])
    plain, reordered = (compiled[compiled.contender == name] for name in ("RE llama", "RE reference"))
    for rows in (plain, reordered):
        needed(rows.index[rows.index.isin([OWN])], "RE compiled in both layouts, in float32 and forward")
    return plain, reordered.loc[plain.index]


@rule("FS-06", "fairseq2_inductor")
def two_more_kernels(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """In every pass RE in halves must launch the stated number of further kernels, and must be slower."""
    plain, reordered = _reordering(inductor)
    more, longer = reordered.kernels - plain.kernels, reordered.median_us / plain.median_us

    def judged(parts: Sequence[tuple[str, str]]) -> Verdict:
        slower = {part: above(noise.ratio(reordered.loc[part], plain.loc[part]), 1.0) for part in parts}
        stated = {part: more[part] == PUBLISHED["kernels"] * PASSES[part[1]] for part in parts}
        words = (f"{' '.join(part)}: {more[part]:.0f} more kernels, {longer[part]:.2f} times as long" for part in parts)
        cells = [slower[part] if stated[part] else False for part in parts]
        return counted(cells, claim.quantifier).with_text("; ".join(words))

    verdict = judged([OWN])
    verdict = verdict.with_text(verdict.measured, more=more[OWN], longer=longer[OWN])
    return verdict.beside(judged([part for part in plain.index if part != OWN]))


@rule("FS-15", "fairseq2_inductor", "fairseq2_log")
def about_four_ms(claim: Claim, inductor: pd.DataFrame, log: pd.DataFrame) -> Verdict:
    """The time that RE in halves takes beyond RE in pairs, for each pass; no GPU is the document's."""
    plain, reordered = _reordering(inductor)
    (batch, seq_len, encoding_dim), stated = PUBLISHED["shape"], PUBLISHED["kernels_ms"]
    added = {
        part: noise.difference(noise.time(reordered.loc[part]), noise.time(plain.loc[part]))
        / exact(1000 * PASSES[part[1]])
        for part in plain.index
    }
    cells = counted([size(ms, printed(stated, 0), no_effect=0) for ms in added.values()], claim.quantifier)
    words = "; ".join(f"{ms} ms in each pass ({' '.join(part)})" for part, ms in added.items())
    as_large = (log.batch == batch) & (log.seq_len * log.encoding_dim == seq_len * encoding_dim)
    log = log[(log["mode"] == "compiled") & as_large]
    logged = value_range(log.re_reference_ms - log.re_llama_ms, ".1f")
    return untold(claim.needs).beside(cells.with_text(words)).with_text(
        "", f"in the log, the cell of as many bytes differs by {logged} ms",
        added=(reordered.median_us[OWN] - plain.median_us[OWN]) / 1000, stated=stated,
    )  # fmt: skip


@rule("FS-09", "fairseq2_reorderings")
def reorderings_compile_alike(claim: Claim, reorderings: pd.DataFrame) -> Verdict:
    """Whether Inductor generates the same code, up to names, for our ways, beyond the document, which shows none."""
    ran = reorderings[is_right(reorderings)]
    operators = {*PUBLISHED["reorderings"], PUBLISHED["reordering_used"]}
    named = ran.variant.map(lambda variant: set(variant.split(", ")) <= operators)
    if named.sum() < 2 or ran.code.isna().any():
        raise Untold("at least two ways to reorder with the named operators, compiled")
    ways = "; ".join(f"{row.variant}: code {row.code}, {row.kernels:.0f} kernels" for row in ran.itertuples())
    counts = {"named": named.sum(), "codes": ran[named].code.nunique(), "ways": len(ran), "all": ran.code.nunique()}
    return untold(claim.needs).with_text("", **counts).beside(fact(counts["all"] == 1).with_text(ways))


@rule("FS-11", "fairseq2_grid", "fairseq2_inductor")
def cosines_as_baseline(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame) -> Verdict:
    """The speed of RRE in pairs must be larger than the speed of RE in halves, cell by cell.

    Each speed is a fraction of the speed of the class whose own layout this is. The document compares 0.86 and 0.66 in
    this way.
    """

    def speeds(frame: pd.DataFrame, direction: str) -> Verdict:
        where = f"mode == 'compiled' and direction == '{direction}'"
        cells = {"record": "times", "where": where, "cell": ["dtype", *SHAPE], "protocol": DOCUMENT, "above": 1.0}
        rre, re = (
            Comparison.read(claim.id, cells | {"over": over, "under": under}).values({"times": frame}, claim.needs)
            for over, under in (("RE llama", "RRE llama"), ("RRE reference", "RE reference"))
        )
        each = [noise.mean(list(found.values())) for found in (rre, re)]
        means = [value_range([one]) for one in each]
        return counted([above(rre[cell] / re[cell], 1.0) for cell in rre], claim.quantifier).with_text(
            f"speed in the foreign layout of the class at home there, RRE {means[0]} and RE {means[1]} in the mean of "
            f"{len(rre)} cells ({direction})",
            rre=each[0].value, re=each[1].value,
        )  # fmt: skip

    large = pd.concat((grid[grid.direction != "forward"], inductor))
    beyond = [speeds(large, direction) for direction in PASSES]
    both = counted(beyond, claim.quantifier).with_text("; ".join(one.measured for one in beyond))
    return speeds(grid, "forward").beside(both)


def another_compiler(grid: pd.DataFrame, log: pd.DataFrame) -> str:
    """What compiling does to RE in pairs, in the log and here."""
    here = timed(grid[(grid.direction == "forward") & (grid.contender == "RE llama")], "RE llama")
    both = log.pivot_table("re_llama_ms", SHAPE, "mode"), here.pivot_table("median_us", SHAPE, "mode")
    logged, ours = (value_range(times.compiled / times.eager) for times in both)
    return (
        f"compiled RE for pairs takes {logged} of its eager time in the log, and {ours} here: another compiler "
        "(torch 2.11 here; the document is of June 2025 and prints no version)"
    )


for _claim in ("FS-07", "FS-11"):
    remark(_claim, "fairseq2_grid", "fairseq2_log")(another_compiler)


@remark("FS-08", "fairseq2_grid", "fairseq2_log", "fairseq2_summary")
def where_0_86_comes_from(
    grid: pd.DataFrame, log: pd.DataFrame, summary: pd.DataFrame
) -> tuple[str, dict[str, object]]:
    llama = summary[(summary["mode"] == "compiled") & (summary.ratio == "llama")].iloc[0]
    return (
        f"the log's ratios give {llama.of_inverses:.3f} in the mean, and {llama.of_large_inverses:.2f} in that of its "
        f"large shapes, of {LARGE:,} features and more; {another_compiler(grid, log)}"
    ), {"logged": llama.of_inverses}


@remark("FS-05", "fairseq2_grid", "fairseq2_log", "fairseq2_summary")
def where_1_12_comes_from(
    grid: pd.DataFrame, log: pd.DataFrame, summary: pd.DataFrame
) -> tuple[str, dict[str, object]]:
    native = _geometric((log.rre_reference_ms / log.re_llama_ms)[log["mode"] == "compiled"])
    llama = summary[(summary["mode"] == "compiled") & (summary.ratio == "llama")].of_ratios.iloc[0]
    return (
        f"the log's times give {native:.3f}; its printed {PUBLISHED['native_ratio']} is the arithmetic mean of RRE "
        f"llama over RE llama ({llama:.3f} from its ratios); {another_compiler(grid, log)}"
    ), {"logged": native}


@remark("FS-13", "fairseq2_log", "fairseq2_printed")
def what_the_session_tested(log: pd.DataFrame, printed: pd.DataFrame) -> str:
    """The kind of a test is the kind of its lines in the log: a time or the summary. Only the others may compare."""
    collected = int(printed.set_index("figure").value["items collected"])
    items = {test["prints"]: len(list(cases(test))) for test in facts("test", "fairseq2")}
    times = min(items["timings"], len(log))
    return (
        f"of {collected} items of the logged session {times} time, {items['summary']} sums up, "
        f"{collected - times - items['summary']} may compare results"
    )


@remark("FS-03", "fairseq2_equality")
def tables_differ(equality: pd.DataFrame) -> str:
    tables = equality[equality.what == "tables"].sort_values("positions")
    worst = tables[(tables["first"] == "RE") & (tables.second == "RRE")].iloc[-1]
    return "" if worst.equal else (
        f"their tables differ: up to position {worst.positions:,.0f} by up to {worst.difference:.1e}, as both round "
        "the angle to float32, and not alike"
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- studies: what is called
# Times are GPU time only, from CUDA graphs (`ropelab.bench.timing`). They do not include the host's time of an eager
# call, which the document's figures of small cells include. An encoder serves the longest sequence, as in a model.

NAMES = tuple(f"{name} {impl}" for name in ("RE", "RRE", "ropelab") for impl in LAYOUTS)
"""Contenders: class and ``impl``. The grid does not compile the kernel: either way it is one launch (``inductor``)."""
_MOST_SETS = 16  # the most sets of tensors: enough to keep the grid's smallest cell out of the cache of an H200
_CHECKED_TOKENS = 64  # the number of tokens that are checked at each end of every sequence
_HELD = 12  # the most float32 tensors that a contender's graph keeps, the tensors of its warm-up call included
_MOST_HELD = 16 * 2**30  # the most bytes of the graphs of contenders together: other studies need memory too


@dataclass(frozen=True)
class Cell:
    """One shape ``[batch, seq_len, encoding_dim]``, float32 or bfloat16."""

    batch: int
    seq_len: int
    encoding_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.seq_len, self.encoding_dim

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify the cell, and ``bytes``: the fewest bytes that a forward moves.

        The tables count as read once, with a column for each pair in float32. They count here because a head of E
        features is as wide as its rows of the tables.
        """
        least = self.seq_len * self.encoding_dim * (2 * self.batch * self.dtype.itemsize + 4)
        dtype = str(self.dtype).removeprefix("torch.")
        return dict(zip(SHAPE, self.shape, strict=True)) | {"dtype": dtype, "bytes": least}

    def __str__(self) -> str:
        return f"B{self.batch} S{self.seq_len} E{self.encoding_dim}"


# The cells of one E follow each other, because each E has its own compiled code. Batches of 1 come last, because
# torch.compile always treats them apart.
GRID = tuple(Cell(b, s, e) for e, b, s in product((1024, 2048, 4096), (4, 8, 1), (2048, 4096, 16384)))
SMOKE_GRID = tuple(Cell(b, s, 64) for b, s in product((2, 1), (32, 64)))
"""Two cells with several batches, and two cells with one batch."""


def _large_cells(smoke: bool) -> tuple[Cell, ...]:
    """The shape for which the document names two further kernels and their time, in both dtypes."""
    shape = (2, 64, 64) if smoke else (4, 8192, 8192)
    return tuple(Cell(*shape, dtype) for dtype in (torch.float32, torch.bfloat16))


def _rounds(cell: Cell, smoke: bool) -> int:
    """The number of rounds. It is small where a call takes milliseconds, because the times of long calls vary least."""
    if smoke:
        return 2
    return 3 if math.prod(cell.shape) >= 2**28 else 5


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise Unavailable("the encoders are timed on a GPU")
    return torch.device("cuda")


def _encoders(encoding_dim: int, max_seq_len: int) -> dict[str, torch.nn.Module]:
    classes = {name: getattr(proposed(), of) for name, of in CLASSES.items()} | {"ropelab": KernelRotaryEncoder}
    return {
        f"{name} {impl}": encoder_class(encoding_dim, max_seq_len, impl=impl, device=_device())
        for name, encoder_class in classes.items() for impl in LAYOUTS
    }  # fmt: skip


def _by_mode(encoders: Mapping, compiled: Mapping) -> dict[tuple[str, str], Callable]:
    """(mode, contender) -> the function to call."""
    found = {("kernel" if name.startswith("ropelab") else "eager", name): e for name, e in encoders.items()}
    return found | {("compiled", name): encoder for name, encoder in compiled.items()}


def _compiled_for(cell: Cell) -> tuple[dict[str, torch.nn.Module], dict[tuple[str, str], Callable]]:
    """The encoders by name, and the functions to call by mode and name; all compiled code is dropped first."""
    torch._dynamo.reset()
    encoders = _encoders(cell.encoding_dim, cell.seq_len)
    compiled = {name: torch.compile(encoder, dynamic=False, fullgraph=True) for name, encoder in encoders.items()}
    return encoders, _by_mode(encoders, compiled)


def _tensors(cell: Cell, count: int) -> list[torch.Tensor]:
    return [torch.randn(cell.shape, device=_device(), dtype=cell.dtype) for _ in range(count)]


def _calls(cell: Cell, direction: str, sets: int, dynamic: bool = False) -> Iterator[Callable[[Callable], object]]:
    """For each set of buffers a function that calls a given encoder; ``dynamic`` marks B and S as dynamic."""
    layout = proposed().BatchLayout(cell.shape[:2], None, device=_device())
    for _ in range(sets):
        x, *cotangent = _tensors(cell, 1 if direction == "forward" else 2)
        if cotangent:
            x.requires_grad_()
        if dynamic:
            for axis in (0, 1) if cell.batch > 1 else (1,):
                torch._dynamo.maybe_mark_dynamic(x, axis)
        if cotangent:
            yield partial(_with_backward, x=x, layout=layout, cotangent=cotangent[0])
        else:
            yield partial(_forward, x=x, layout=layout)


def _forward(encoder: Callable, x: torch.Tensor, layout: SeqsLayout) -> torch.Tensor:
    with torch.no_grad():
        return encoder(x, layout)


def _with_backward(encoder: Callable, x: torch.Tensor, layout: SeqsLayout, cotangent: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(encoder(x, layout), x, cotangent)
    return gradient


def _check(call: Callable, encoder: Callable, layout: str, inverse: bool) -> str:
    """``"ok"``, or how the first and last tokens of every sequence differ from the float64 definition.

    The tables are the encoder's own, from angles in float32. The angles are off by ``(3 |ln f| + 4) u |p f|``
    (`ropelab.conformance.conventions`), and library cosines by two units in the last place, 4 u. Two roundings of the
    arithmetic and one rounding of the result come on top, as in `ropelab.bench.peers.error_bound`.
    """
    result = call(encoder)
    x = call.keywords["cotangent" if inverse else "x"].detach()
    ends = torch.arange(x.shape[1], device=x.device)
    ends = torch.cat((ends[:_CHECKED_TOKENS], ends[_CHECKED_TOKENS:][-_CHECKED_TOKENS:]))
    result, x = result[:, ends].double(), x[:, ends].double()
    frequencies = inverse_frequencies(x.shape[-1]).to(x.device)
    angles = torch.outer(ends.double(), frequencies)
    truth = reference.rotate(x.unsqueeze(2), angles.cos(), angles.sin(), layout=layout, inverse=inverse).squeeze(2)
    u = torch.finfo(torch.float32).eps / 2
    stored = torch.finfo(call.keywords["x"].dtype).eps / 2
    off = torch.where(frequencies == 1, 0, u * angles * (3 * frequencies.log().abs() + 4))
    size = sum(x.abs() for x in pairs(x, layout))
    bound = 1.05 * (off + 6 * u + stored) * size + 4 * torch.finfo(call.keywords["x"].dtype).tiny
    error = (result - truth).abs()
    worst = torch.cat([e / bound for e in pairs(error, layout)]).max().item()
    if worst <= 1:
        return "ok"
    relative = (error.norm() / truth.norm()).item()
    return f"wrong: relative error {relative:.3g}, {worst:.3g} times its bound"


def _timed(
    cell: Cell, direction: str, contenders: Mapping[tuple[str, str], Callable], rounds: int, dynamic: bool = False
) -> pd.DataFrame:
    """Check the contenders, then time the right contenders and the copies.

    With the clock stopped, no eager encoder is called.
    """
    from ropelab.bench import copies, timing
    from ropelab.bench.operation import tidy

    if timing.is_stopped():
        contenders = {(mode, name): encoder for (mode, name), encoder in contenders.items() if mode != "eager"}
    tensor_bytes = math.prod(cell.shape) * cell.dtype.itemsize
    sets = min(_MOST_SETS, max(1, math.ceil(2 * timing.cache_bytes() / tensor_bytes)))
    calls = list(_calls(cell, direction, sets, dynamic))
    ready, status = {}, {}
    for (mode, name), encoder in contenders.items():
        try:
            outcome = _check(calls[0], encoder, LAYOUTS[name.split()[1]], inverse=direction != "forward")
        except Exception as error:  # a contender that cannot run is a result too
            outcome = timing.failure(error)
        if outcome == "ok":
            ready[mode, name] = lambda encoder=encoder: [partial(call, encoder) for call in calls]
        else:
            status[mode, name] = outcome
    sources = [[v for n, v in call.keywords.items() if n in ("x", "cotangent")] for call in calls]
    ready |= {("copy", name): prepare for name, prepare in copies.contenders(sources).items()}
    frame = tidy(_gpu_times(ready, cell, rounds), cell.columns | {"direction": direction}, status)
    frame.insert(frame.columns.get_loc("contender"), "mode", [mode for mode, _ in frame.contender])
    frame["contender"] = [name for _, name in frame.contender]
    frame["encoder_code"] = frame.contender.map(dict.fromkeys(IMPLEMENTATIONS, proposed().source))
    return copies.with_fraction(frame)


def _gpu_times(contenders: Mapping, cell: Cell, rounds: int) -> pd.DataFrame:
    """`timing.gpu_times`; contenders share their rounds as far as the memory of their graphs allows."""
    from ropelab.bench import timing

    torch.cuda.empty_cache()
    held = _HELD * math.prod(cell.shape) * 4
    together = max(1, int(min(torch.cuda.mem_get_info()[0] / 2, _MOST_HELD) / held))
    names, frames = list(contenders), []
    for start in range(0, len(names), together):
        part = {name: contenders[name] for name in names[start : start + together]}
        frames.append(timing.gpu_times(part, rounds=rounds, graph_ms=0.5))
        torch.cuda.empty_cache()  # frees the memory of the graphs
    return pd.concat(frames, ignore_index=True)


# ------------------------------------------------------------------------------ studies: the grid, what Inductor makes


def grid(*, smoke: bool = False) -> pd.DataFrame:
    """GPU time of every encoder, eager and compiled, at the document's 27 shapes, in float32.

    The encoders are compiled as in a script that calls one model with several shapes: B and S are dynamic, and E is the
    model's. The layout of a batch has the width S as an int. torch.compile takes the int for a constant at first, and
    as dynamic from the second S on. So for each direction and E, an encoder is compiled for the first S, for all other
    S, and for batches of 1. The record ``inductor`` has static shapes.

    Returns:
        A row per cell, direction and contender: the columns of the cell, direction, mode ("eager", "compiled",
        "kernel", "copy"), contender, status, median_us, q20_us, q80_us, samples, encoder_code, and fraction_of_copy:
        the time of the best copy of the tensors that a direction must read, over the time of the contender. The forward
        must read x; with the backward a call must also read the cotangent.
    """
    from ropelab.bench import in_parts, timing

    cells = SMOKE_GRID if smoke else GRID
    if not timing.is_stopped():
        return _grid(cells, smoke)
    # Only the first cell of each kind is compiled for, because the others would only take memory.
    kinds = {(cell.encoding_dim, cell.batch > 1, cell.seq_len == cells[0].seq_len): cell for cell in cells[::-1]}
    first = [cell for cell in cells if cell in kinds.values()]
    parts = [[cell for cell in first if cell.encoding_dim == e] for e in {cell.encoding_dim: None for cell in cells}]
    return in_parts.compiled(_grid, [(part, smoke) for part in parts], here=smoke)


def _grid(cells: Sequence[Cell], smoke: bool) -> pd.DataFrame:
    longest = max(cell.seq_len for cell in (SMOKE_GRID if smoke else GRID))
    frames, encoders, compiled = [], {}, {}
    with torch._dynamo.config.patch(recompile_limit=64):  # two encoders share one function, and so its recompilations
        for cell in progress(cells, str):
            if not encoders or encoders[NAMES[0]].encoding_dim != cell.encoding_dim:
                torch._dynamo.reset()
                for held in (encoders, compiled):
                    held.clear()  # before the next are made
                encoders |= _encoders(cell.encoding_dim, longest)
                theirs = [name for name in NAMES if not name.startswith("ropelab")]
                compiled |= {name: torch.compile(encoders[name], fullgraph=True) for name in theirs}
            contenders = _by_mode(encoders, compiled)
            for direction in DIRECTIONS:
                frames.append(_timed(cell, direction, contenders, _rounds(cell, smoke), dynamic=True))
    return pd.concat(frames, ignore_index=True)


def generated(*, smoke: bool = False) -> dict[tuple[str, ...], dict[str, object]]:
    """Inductor's code for each encoder at one large shape, compiled for that shape alone, in two dtypes.

    The encoders with our kernel are among them. In Inductor's code the kernel is an operator.

    Returns:
        (dtype, direction, contender) -> a mapping with these keys:

        - generated, fallbacks: the names of the kernels in Inductor's code, and of the operators that it leaves to
          eager
        - generated_bytes: the bytes that the generated kernels read and write, by Inductor's own account
        - code: a hash of the generated kernels without their names and comments
        - complex_warning, warnings: whether a warning of the compilation names complex numbers, and all warnings
    """
    found = {}
    for cell in _large_cells(smoke):
        _, contenders = _compiled_for(cell)
        for direction in progress(DIRECTIONS, f"{cell} {cell.columns['dtype']}, {{}}".format):
            (call_with,) = _calls(cell, direction, sets=1)
            for (mode, name), encoder in contenders.items():
                if mode == "compiled":
                    key = cell.columns["dtype"], direction, name
                    found[key] = _facts(f"compiled {name}", _generated, partial(call_with, encoder))
            del call_with
    return found


def inductor(found: Mapping[tuple[str, ...], dict[str, object]], *, smoke: bool = False) -> pd.DataFrame:
    """The time, the memory and the kernels of each encoder at the shape of ``generated``, eager and compiled.

    The columns of ``generated`` come from a compilation of their own, because code that comes from the cache is not
    seen.

    Args:
        found: the result of ``generated``.

    Returns:
        The columns of ``grid``, without the rows of the copies, and these columns:

        - kernels, launched: the number of kernels (copies and fills included) that a call runs on the GPU, and their
          names
        - peak_bytes, result_bytes: the memory of the call, the result included, and the memory of the result alone
        - state_bytes: the memory of the encoder's tables
        - the columns of ``generated``
    """
    frames = []
    for cell in _large_cells(smoke):
        encoders, contenders = _compiled_for(cell)
        state = {name: sum(b.nbytes for b in encoder.buffers()) for name, encoder in encoders.items()}
        for direction in progress(DIRECTIONS, f"{cell} {cell.columns['dtype']}, {{}}".format):
            times = _timed(cell, direction, contenders, _rounds(cell, smoke))
            times = times[times["mode"] != "copy"].reset_index(drop=True)
            (call_with,) = _calls(cell, direction, sets=1)
            facts = []
            for row in times.itertuples():
                encoder = contenders[row.mode, row.contender]
                ran = _facts(f"{row.mode} {row.contender}", _footprint, partial(call_with, encoder))
                made = found.get((row.dtype, row.direction, row.contender), {}) if row.mode == "compiled" else {}
                facts.append(ran | made | {"state_bytes": state[row.contender]})
            del call_with
            frames.append(pd.concat([times, pd.DataFrame(facts)], axis=1))
    return pd.concat(frames, ignore_index=True)


def _facts(what: str, find: Callable[[Callable], dict[str, object]], call: Callable) -> dict[str, object]:
    """The facts that ``find`` finds about the call. A contender that fails has no facts; its status says why."""
    from ropelab.bench import timing

    try:
        return find(call)
    except Exception as error:
        print(f"    {what}: {timing.failure(error)}", file=sys.stderr, flush=True)
        return {}


def _footprint(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    return _launched(call) | {"peak_bytes": peak_bytes(call), "result_bytes": call().nbytes}


def _launched(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    names = kernel_names(call)
    return {"kernels": len(names), "launched": "; ".join(_short(name) for name in names)}


def _short(kernel: str) -> str:
    """A kernel's name, cut off after 97 characters because template arguments fill pages."""
    name = re.sub(r"^void ", "", kernel)
    return name if len(name) <= 100 else name[:97] + "..."


def _generated(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    """The facts of ``generated`` about a call that must not have been compiled before."""
    import torch._inductor.lowering as lowering
    from torch._inductor.utils import fresh_cache, run_and_get_code

    # Inductor warns of complex numbers once in a process: make this compilation warn again.
    getattr(getattr(lowering, "_warn_complex_not_supported", None), "cache_clear", lambda: None)()
    with (
        warnings.catch_warnings(record=True) as caught,
        fresh_cache(),  # code that comes from the cache is not generated, and then not seen
        torch._inductor.config.patch(benchmark_kernel=True),  # writes the bytes of each kernel into the code
        replaced.attributes(torch._dynamo, reset=lambda: None),  # keeps the code that was compiled before
        contextlib.redirect_stderr(io.StringIO()),  # Inductor prints the path of every such module here
    ):
        warnings.simplefilter("always")
        _, codes = run_and_get_code(call)
    messages = list(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught))
    complex_warning = any("complex" in message for message in messages)
    return read_code(codes) | {"complex_warning": complex_warning, "warnings": "; ".join(messages)}


_VIEWS = {
    "view", "view_as_complex", "view_as_real", "slice", "unsqueeze", "squeeze", "select", "_conj", "expand",
    "permute", "reshape", "alias", "as_strided", "detach",
}  # fmt: skip


def read_code(codes: Sequence[str]) -> dict[str, object]:
    """generated, fallbacks, generated_bytes and code (see ``generated``) of Inductor's wrapper code.

    Operators that only make a view are no fallbacks, because they run nothing.

    Args:
        codes: a piece of wrapper code for each direction.
    """
    launched, fallbacks, sources = [], [], {}
    for code in codes:
        sources |= dict(re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, flags=re.DOTALL))
        wrapper = re.sub(r"'''.*?'''", "", code, flags=re.DOTALL)  # the source of a kernel has a launch for timing
        runs = re.findall(r"^\s*(\w+)\.run\(", wrapper, flags=re.MULTILINE)
        launched += [(name, sources.get(name, "")) for name in runs]
        operators = re.findall(r"= torch\.ops\.(?:aten|prims)\.(\w+)\.\w+\(", wrapper)
        fallbacks += [name for name in operators if name not in _VIEWS]
    gigabytes = [re.search(r"'kernel_num_gb': ([\d.e-]+)", source) for _, source in launched]
    return {
        "generated": ", ".join(name for name, _ in launched),
        "fallbacks": ", ".join(fallbacks),
        "generated_bytes": round(1e9 * sum(float(g[1]) for g in gigabytes)) if all(gigabytes) else float("nan"),
        "code": hashlib.sha256("".join(_body(source) for _, source in launched).encode()).hexdigest()[:12],
    }


def _body(source: str) -> str:
    """A kernel without its name and comments, and without the code behind it, which launches it by name for timing."""
    body = "".join(re.findall(r"^@triton\.jit\ndef .*?(?=^\S|\Z)", source, flags=re.DOTALL | re.MULTILINE))
    return re.sub(r"#.*|\s+", " ", re.sub(r"def \w+\(", "def kernel(", body))


# --------------------------------------------------------------------------------------- studies: ways to reorder


def _transposed(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    sizes = (2, -1) if source == "split_half" else (-1, 2)
    return x.unflatten(-1, sizes).transpose(-1, -2).flatten(-2)


def _concatenated(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    x0, x1 = pairs(x, source)
    if target == "split_half":
        return torch.cat((x0, x1), dim=-1)
    return torch.cat((x0.unsqueeze(-1), x1.unsqueeze(-1)), dim=-1).flatten(-2)


def _filled(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    y = torch.empty_like(x)
    for y_half, x_half in zip(pairs(y, target), pairs(x, source), strict=True):
        y_half.copy_(x_half)
    return y


REORDERINGS: dict[str, Callable[[torch.Tensor, str, str], torch.Tensor] | None] = {
    "stack, view, cat": None,
    "unflatten, transpose, flatten": _transposed,
    "unsqueeze, cat": _concatenated,
    "empty, filled": _filled,
}
"""Operators -> a function of x and the layouts before and after. The first is the pull request's own way."""


def _reordering_by(reorder: Callable | None, encoder: torch.nn.Module) -> torch.nn.Module:
    """The encoder with another way to reorder, over the same table."""
    found = copy.copy(encoder)
    if reorder is not None:
        found._split_to_consecutive_layout = lambda tensor: reorder(tensor, "split_half", "interleaved")
        found._consecutive_to_split_layout = lambda tensor: reorder(tensor, "interleaved", "split_half")
    return found


def reorderings(*, smoke: bool = False) -> pd.DataFrame:
    """Ways to write the reordering that RE needs for halves, compiled; forward, float32.

    The encoder is the one under study. Its two methods that reorder are its own in the first variant, and are replaced
    in the others.

    Returns:
        Columns of the cell, variant, status, median_us, q20_us, q80_us, samples, kernels, launched, generated,
        fallbacks, generated_bytes and code (see ``generated`` and ``inductor``), and encoder_code: which code ran.
        Times are means over several inputs, because the place of a tensor in memory affects the time.
    """
    from ropelab.bench import timing
    from ropelab.bench.operation import tidy

    cell, fairseq2 = _large_cells(smoke)[0], proposed()
    torch._dynamo.reset()
    encoder = fairseq2.RotaryEncoder(cell.encoding_dim, cell.seq_len, device=_device(), impl="reference")
    layout = fairseq2.BatchLayout(cell.shape[:2], None, device=_device())
    inputs = _tensors(cell, 3)
    expected = _forward(encoder, inputs[0], layout)
    contenders, facts, status = {}, {}, {}
    for name, reorder in REORDERINGS.items():
        compiled = torch.compile(_reordering_by(reorder, encoder), dynamic=False, fullgraph=True)
        calls = [partial(_forward, compiled, x, layout) for x in inputs]
        try:
            facts[name] = _generated(calls[0]) | _launched(calls[0])
            if torch.equal(calls[0](), expected):
                contenders[name] = lambda calls=calls: calls
            else:
                status[name] = "wrong: other bits than the encoder's"
        except Exception as error:  # a way that cannot run is a result too
            status[name] = timing.failure(error)
    del expected
    frame = tidy(_gpu_times(contenders, cell, _rounds(cell, smoke)), cell.columns, status)
    frame = frame.rename(columns={"contender": "variant"}).assign(encoder_code=fairseq2.source)
    columns = pd.DataFrame([facts.get(name, {}) for name in frame.variant])
    return pd.concat([frame, columns.drop(columns=["warnings", "complex_warning"], errors="ignore")], axis=1)


STUDIES: dict[str, Study] = {
    # The memory holds the tables of six encoders, x and its cotangent, and the tensors that a compiled call keeps, in
    # float32. With the clock stopped, no eager encoder is called, and the grid has only one cell for each compilation.
    "fairseq2_defaults": Study(defaults, gpu_gib=1, rows=28, timed=False),
    "fairseq2_equality": Study(equality, gpu_gib=1, rows=26, timed=False),
    "fairseq2_grid": Study(grid, gpu_gib=10, rows=108),
    "fairseq2_inductor": Study(inductor, untimed=generated, gpu_gib=11, rows=8),
    "fairseq2_reorderings": Study(reorderings, gpu_gib=8, rows=4),
}
"""The name of a record -> the study that measures it."""
