"""The evidence for claims on fairseq2#1213 that a CPU computes in seconds: the document's log, and comparisons."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from ropelab import rotary_table
from ropelab.bench.records import ROOT
from ropelab.interop.fairseq2 import LAYOUTS, KernelRotaryEncoder
from ropelab.layout.pairing import join, permutation
from ropelab.study.documents.fairseq2.encoders import ENCODER_CODE, Encoders, proposed
from ropelab.study.documents.fairseq2.peers import Fairseq2, released
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.sources import cases, facts

LOG = ROOT / "data" / "documents" / "fairseq2_1213_log.csv"
SUMMARY = ROOT / "data" / "documents" / "fairseq2_1213_summary.csv"
DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "forward and backward")
"""The document states neither dtype nor direction; the first of each is its own, by what it says of its kernels."""
LARGE = 2**27
CELL = ["mode", "seq_len", "batch", "encoding_dim"]
IMPLEMENTATIONS = ("RE llama", "RRE llama", "RE reference", "RRE reference")
"""The document's four columns: ``RotaryEncoder`` (RE) or ``ReferenceRotaryEncoder`` (RRE), and ``impl``."""
RATIOS = {
    "llama": ("RRE llama", "RE llama"),
    "reference": ("RRE reference", "RE reference"),
    "native": ("RRE reference", "RE llama"),
}
"""Ratio of times -> numerator and denominator. The document prints the first two.

The ratio "native" compares each class in the layout that it had before the pull request.
"""


@cache
def _claims_file() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "data" / "claims" / "fairseq2.toml").read_text(encoding="utf-8"))


def published() -> Mapping[str, Any]:
    """The figures that the document's text states, by name."""
    return _claims_file()["published"]


@evidence("fairseq2_changes", "the pull request's commits, read in the public repository")
def changes() -> pd.DataFrame:
    """A row for each file that a commit of the pull request changes: columns commit, file."""
    return pd.DataFrame(
        [{"commit": change["commit"], "file": file} for change in _claims_file()["change"] for file in change["files"]]
    )


@evidence("fairseq2_log", "the document's log")
def log() -> pd.DataFrame:
    """A row for each cell and implementation: columns mode, seq_len, batch, encoding_dim, contender, ms."""
    frame = _log()
    names = {f"{name.lower().replace(' ', '_')}_ms": name for name in IMPLEMENTATIONS}
    long = frame.melt(CELL, list(names), "contender", "ms")
    return long.assign(contender=long.contender.map(names))


@evidence("fairseq2_summary", "recomputed from the document's log")
def summary() -> pd.DataFrame:
    """The means that the document prints, beside the means that follow from its log.

    Columns: mode, ratio, printed, of_ratios (the mean of the log's own ratios, which are rounded less), of_times (the
        mean of the ratios of the printed milliseconds), of_inverses, of_large_inverses (the geometric mean of the
        inverses of the log's ratios, over all shapes and over those of at least `LARGE` features).
    """
    printed, found = pd.read_csv(SUMMARY), _log()
    rows = []
    for ratio in ("llama", "reference"):
        stated = printed[printed.figure == f"mean RRE/RE {ratio}"].set_index("mode").value
        for mode, cells in found.groupby("mode"):
            times = cells[f"rre_{ratio}_ms"] / cells[f"re_{ratio}_ms"]
            inverses, features = 1 / cells[f"stated_rre_over_re_{ratio}"], cells[CELL[1:]].prod(axis=1)
            rows.append({
                "mode": mode, "ratio": ratio, "printed": stated[mode],
                "of_ratios": cells[f"stated_rre_over_re_{ratio}"].mean(), "of_times": times.mean(),
                "of_inverses": geometric(inverses), "of_large_inverses": geometric(inverses[features >= LARGE]),
            })  # fmt: skip
    return pd.DataFrame(rows)


def geometric(values: pd.Series) -> float:
    """The geometric mean, whose reciprocal is that of the reciprocals."""
    return float(np.exp(np.log(values).mean()))


@evidence("fairseq2_session", "counted in the document's log, its tests as in data/sources.toml")
def session() -> pd.DataFrame:
    """The number of items of each kind in the document's test session: columns kind, items.

    The kind of a test is the kind of its lines in the log: a time or the summary. All other items of the session are
    "anything else": items beyond those lines, and items that no known test explains. Only these may compare results.
    """
    collected = int(pd.read_csv(SUMMARY).set_index("figure").value["items collected"])
    items = {"timings": 0, "summary": 0}
    for test in facts("test", "fairseq2"):
        items[test["prints"]] += len(list(cases(test)))
    items["timings"] = min(items["timings"], len(_log()))
    others = collected - sum(items.values())
    return pd.DataFrame([*items.items(), ("anything else", others)], columns=["kind", "items"])


def ratios(times: pd.DataFrame, value: str) -> pd.DataFrame:
    """The three ``RATIOS`` of each cell: the columns of the cell, ratio (its name), and times (the quotient).

    Args:
        times: a table with the columns of a cell, ``contender``, and a column of times.
        value: the name of the column of times.
    """
    cell = [name for name in times.columns if name not in ("contender", value)]
    wide = times.pivot_table(index=cell, columns="contender", values=value)
    parts = [
        (wide[over] / wide[under]).rename("times").dropna().reset_index().assign(ratio=name)
        for name, (over, under) in RATIOS.items()
        if {over, under} <= set(wide)
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*cell, "times", "ratio"])


# ------------------------------------------------------------------------------------------------- are they equal?

_TABLES = {
    # The cosines and sines in the rows after the row for padding, with a column for each pair.
    "RE": lambda e: (e.freqs[1:, :, 0], e.freqs[1:, :, 1]),
    "RRE": lambda e: tuple(t[1:, : e.encoding_dim // 2] for t in (e.cos_freqs, e.sin_freqs)),
    "kernel": lambda e: (e.cos, e.sin),
}
POSITIONS = (2048, 4096, 16384)


@evidence("fairseq2_equality", "computed on the CPU with the pull request's own encoders")
def equality() -> pd.DataFrame:
    """`comparisons` of the pull request's own encoders."""
    return comparisons(proposed())


def comparisons(encoders: Encoders) -> pd.DataFrame:
    """Whether the encoders compute the same.

    Columns: what, first, second, layout, direction, positions, equal, difference (largest, absolute), encoder_code. The
    column what has three values:

    - "formula": tables and inputs are small integers, for which float32 is exact. A rotation is linear in its input and
      in its tables. So two rotations that agree on random integers are the same polynomial, but for an accident.
    - "permutation": ``impl="reference"`` of x against ``impl="llama"`` of the reordered x, reordered back. The bits are
      compared.
    - "tables": the tables that each encoder makes, for positions below ``positions``. They are compared with float64
      tables (``second`` is "exact") and with one another.
    """
    frame = pd.DataFrame([*formulas(encoders), *permutations(encoders), *_tables(encoders)])
    frame = frame.astype({"positions": "Int64"}).assign(**{ENCODER_CODE: encoders.source})
    frame.attrs["source"] = f"computed on the CPU with {encoders.source}"
    return frame


def formulas(encoders: Encoders) -> Iterator[dict]:
    """Yield the rows "formula" of ``comparisons``."""
    generator = torch.Generator().manual_seed(0)
    seqs, cotangent = (torch.randint(-64, 65, (3, 7, 2, 16), generator=generator).float() for _ in range(2))
    cos, sin = (torch.randint(-8, 9, (7, 8), generator=generator).float() for _ in range(2))
    for impl, layout in LAYOUTS.items():
        results = {}
        for name, encoder_class in _and_kernel(encoders).items():
            encoder = encoder_class(16, 7, impl=impl)
            _fill(name, encoder, cos, sin)
            results[name] = _both_directions(encoders, encoder, seqs, cotangent)
        for other in ("RRE", "kernel"):
            for direction, first, second in zip(("forward", "backward"), results["RE"], results[other], strict=True):
                yield _compared("formula", "RE", other, first, second, layout=layout, direction=direction)


def permutations(encoders: Encoders) -> Iterator[dict]:
    """Yield the rows "permutation" of ``comparisons``."""
    generator = torch.Generator().manual_seed(1)
    seqs, cotangent = (torch.randn(3, 7, 2, 16, generator=generator) for _ in range(2))
    to_pairs, to_halves = (
        permutation(16, *names) for names in (("split_half", "interleaved"), ("interleaved", "split_half"))
    )
    sorted_seqs, sorted_cotangent = seqs[..., to_pairs], cotangent[..., to_pairs]
    for name, encoder_class in _and_kernel(encoders).items():
        halves = _both_directions(encoders, encoder_class(16, 7, impl="reference"), seqs, cotangent)
        adjacent = _both_directions(encoders, encoder_class(16, 7, impl="llama"), sorted_seqs, sorted_cotangent)
        for direction, first, second in zip(("forward", "backward"), halves, adjacent, strict=True):
            what = f"{name} reference", f"{name} llama"
            yield _compared("permutation", *what, first, second[..., to_halves], direction=direction)


def _and_kernel(encoders: Encoders) -> dict[str, type]:
    """The two classes, and the class of our kernel."""
    return {**encoders.classes, "kernel": KernelRotaryEncoder}


def _tables(encoders: Encoders, encoding_dim: int = 256) -> Iterator[dict]:
    most = max(POSITIONS)
    found = {name: _TABLES[name](c(encoding_dim, most, impl="reference")) for name, c in _and_kernel(encoders).items()}
    found["exact"] = rotary_table(most, encoding_dim, dtype=torch.float64)
    for first, second in (("RE", "exact"), ("RRE", "exact"), ("kernel", "exact"), ("RE", "RRE")):
        for positions in POSITIONS:
            tables = (torch.cat([t[:positions] for t in found[name]]) for name in (first, second))
            yield _compared("tables", first, second, *tables, positions=positions)


def _fill(name: str, encoder: torch.nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Give the encoder of that name these tables, ``[max_seq_len, E/2]``, in place of its own."""
    if name == "RE":
        encoder.freqs[1:] = torch.stack((cos, sin), dim=-1)
    elif name == "RRE":
        encoder.cos_freqs[1:], encoder.sin_freqs[1:] = (join(t, t, LAYOUTS[encoder.impl]) for t in (cos, sin))
    else:
        encoder.cos, encoder.sin = cos, sin


def _both_directions(
    encoders: Encoders, encoder: Callable, seqs: torch.Tensor, cotangent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = seqs.clone().requires_grad_()
    result = encoder(leaf, encoders.batch_layout(seqs.shape[:2], None))
    return result.detach(), torch.autograd.grad(result, leaf, cotangent)[0]


def _compared(what: str, first: str, second: str, a: torch.Tensor, b: torch.Tensor, **where) -> dict:
    return {
        "what": what, "first": first, "second": second, **where,
        "equal": torch.equal(a, b), "difference": (a.double() - b.double()).abs().max().item(),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ does it break?


@evidence("fairseq2_defaults", "computed on the CPU with released fairseq2")
def defaults() -> pd.DataFrame:
    """`kept` of the pull request's own encoders and of released fairseq2."""
    return kept(proposed(), released())


def kept(encoders: Encoders, theirs: Fairseq2) -> pd.DataFrame:
    """The bits of the encoders without ``impl`` against the bits of released fairseq2, which has no ``impl``.

    The columns are encoder, case, equal and encoder_code. The cases are the ways to be called, the buffers, and the
    signature.
    """
    rows = []
    for key, name in CLASS_NAMES.items():
        pair = encoders.classes[key], getattr(theirs, name)
        new, old = (made(16, 32) for made in pair)
        for case, seqs, layouts, training, step in _calls(encoders.batch_layout, theirs.BatchLayout):
            bag = None if step is None else SimpleNamespace(step_nr=step)
            outputs = [
                e.train(training)(seqs, layout, state_bag=bag) for e, layout in zip((new, old), layouts, strict=True)
            ]
            same = outputs[0].dtype == outputs[1].dtype and torch.equal(*outputs)
            rows.append({"encoder": name, "case": case, "equal": same})
        buffers = [dict(e.named_buffers()) for e in (new, old)]
        same = buffers[0].keys() == buffers[1].keys() and all(
            torch.equal(buffers[0][n], t) for n, t in buffers[1].items()
        )
        same_keys = new.state_dict().keys() == old.state_dict().keys()
        for case, equal in zip(_WHOLE, (same, same_keys, _callable_as_before(*pair)), strict=True):
            rows.append({"encoder": name, "case": case, "equal": equal})
    frame = pd.DataFrame(rows).assign(**{ENCODER_CODE: encoders.source})
    frame.attrs["source"] = f"computed on the CPU: {encoders.source} against {theirs.source}"
    return frame


CLASS_NAMES = {"RE": "RotaryEncoder", "RRE": "ReferenceRotaryEncoder"}
_WHOLE = ("names and contents of the buffers", "keys of a checkpoint", "signature")
"""The cases of ``defaults`` that call nothing."""


def _calls(*batch_layouts: type) -> Iterator[tuple[str, torch.Tensor, list[Any], bool, int | None]]:
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


def _log() -> pd.DataFrame:
    return pd.read_csv(LOG)
