"""The bars of the kernel family, each beside the worst case in the records."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from ropelab.bench import records
from ropelab.bench.names import NO_GRAD, PLAIN, RECORDED
from ropelab.bench.peers import TRANSFORMER_ENGINE
from ropelab.bench.rows import is_right, need
from ropelab.study.topics.performance.comparison import OURS, timed

ONE, MANY, SKEWED = "n=1", "n=2401", "one of 34,336 and 2,400 of 13"
"""Three cases of the record ``packed``, with 65,536 tokens each.

The tokens are one sequence, or 2,401 equal sequences, or one long sequence among short sequences.
"""
READS_TWICE = "token-linear, reads twice"
TOKEN_LINEAR = {
    TRANSFORMER_ENGINE.name: TRANSFORMER_ENGINE.name,
    READS_TWICE: "a model of the token-linear kernel, which reads twice",
}
"""The name in the record ``packed`` -> the name in words, for TransformerEngine's kernel and for its model."""
FORMATS = ("bshd", "sbhd", "bhsd", "qkv")
"""The names of the formats in the record ``formats``. In "qkv", q and k are views of a bshd buffer that holds v too."""
LEAST_OF_COPY, LEAST_OF_COPY_NORM, LEAST_OVER_COMPILED = 0.95, 0.90, 1.5
"""The bars: the fraction of a copy for a rotation and for norm and rotation, and the speed over compiled functions."""
IN_PLACE = "ropelab in place"
ROUNDED_UP = 6 * 512
"""The most bytes that torch adds to the results, because it rounds every allocation up to a multiple of 512 bytes.

QK norm has six results: q, k and four gradients.
"""


@dataclass(frozen=True)
class Bar:
    """A limit, and the worst of the cases to which the limit applies.

    Attributes:
        what: the words behind the number in a sentence: "of a copy in bhsd".
        worst: the number of the worst case; NaN if ropelab has no time in a case, which misses the bar.
        at_least: whether the limit is the smallest number allowed; else it is the largest.
        where: the name of the worst case.
        cases, missed: the number of cases, and the number of cases that miss the bar.
    """

    what: str
    worst: float
    limit: float
    at_least: bool
    where: str
    cases: int
    missed: int

    @property
    def met(self) -> bool:
        return not self.missed

    @property
    def number(self) -> str:
        return "nothing" if math.isnan(self.worst) else toward_worse(self.worst, at_least=self.at_least)

    @property
    def asked(self) -> str:
        limit = f"{self.limit:,.0f}" if self.limit >= 100 else f"{self.limit:.2f}"
        return f"at {'least' if self.at_least else 'most'} {limit}"

    @property
    def verdict(self) -> str:
        if self.met:
            return "met"
        return "missed" if self.cases == 1 else f"missed in {self.missed} of {self.cases}"


def toward_worse(value: float, *, at_least: bool) -> str:
    """The number as text, rounded away from the bar: three decimals, or none for 0 and from 100 on (bytes)."""
    places = 0 if value == 0 or value >= 100 else 3
    toward = math.floor if at_least else math.ceil
    return f"{toward(round(10**places * value, 6)) / 10**places:,.{places}f}"


def in_all_formats(dense: pd.DataFrame, formats: pd.DataFrame) -> pd.DataFrame:
    """The rows of both records, with a column ``format`` that has a name of ``FORMATS``."""
    frame = pd.concat([dense, formats], ignore_index=True)
    is_view = frame.storage == "qkv" if "storage" in frame else False
    return frame.assign(format=frame.seq_format.mask(is_view, "qkv"))


def smallest_fractions(dense: pd.DataFrame, formats: pd.DataFrame) -> pd.DataFrame:
    """The smallest fraction of a copy over layouts and directions: a row per format and cell, a column per contender.

    NaN stands for a contender that is not offered, not right or not at hand in the whole cell.
    """
    times = timed(in_all_formats(dense, formats))
    table = times.groupby(["format", "cell", "contender"], sort=False).fraction_of_copy.min().unstack("contender")
    order = [(name, cell) for name in FORMATS for cell in dict.fromkeys(times.cell) if (name, cell) in table.index]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["format", "cell"]))


def format_bars(dense: pd.DataFrame, formats: pd.DataFrame) -> list[Bar]:
    ours = _ours(in_all_formats(dense, formats))
    return [
        _bar(f"of a copy in {name}", _by(rows, "cell", "layout", "direction").fraction_of_copy, least=LEAST_OF_COPY)
        for name in FORMATS
        if len(rows := ours[ours.format == name])
    ]


def packed_bars(packed: pd.DataFrame) -> list[Bar]:
    key = "case", "layout", "direction"
    ours = _by(_ours(packed), *key)
    times = ours.median_us.unstack("case")
    bars = [
        _bar(f"times as long {name}", times[case] / times[ONE], most=1.03)
        for case, name in (
            (MANY, "for 2,401 sequences as for one"),
            (SKEWED, "for one long and 2,400 short sequences as for one"),
        )
        if {case, ONE} <= set(times)
    ]
    bars.append(_bar("of a copy", ours.fraction_of_copy, least=LEAST_OF_COPY))
    for contender, name in TOKEN_LINEAR.items():
        theirs = _by(_timed(packed, contender), *key).median_us
        if len(theirs):
            faster = theirs / ours.median_us.reindex(theirs.index)
            return [*bars, _bar(f"times as fast as {name}", faster, least=2.0)]
    return bars


def few_tokens_bars(few: pd.DataFrame) -> list[Bar]:
    over_copy = 1 / _by(_ours(few), "cell", "layout", "direction").fraction_of_copy
    return [_bar("times as long as a copy, 1 to 8 tokens", over_copy, most=1.2)]


def host_bars(host: pd.DataFrame) -> list[Bar]:
    """Host time over the host time of Liger's function, and of vLLM's operator, in the same run.

    vLLM's operator works in place and without autograd. There is no bar for a package or a call that was not measured.
    """
    cases = (
        ("liger", NO_GRAD, OURS, NO_GRAD, 0.5, "of Liger's host time without autograd"),
        ("liger", RECORDED, OURS, RECORDED, 0.8, "of Liger's host time with autograd"),
        ("vllm", NO_GRAD, IN_PLACE, NO_GRAD, 1.3, "times vLLM's host time in place"),
        ("vllm", NO_GRAD, OURS, NO_GRAD, 1.8, "times vLLM's host time into new tensors"),
        ("vllm", NO_GRAD, OURS, RECORDED, 2.8, "times vLLM's host time with autograd"),
        ("vllm", PLAIN, IN_PLACE, PLAIN, 1.2, "times vLLM's host time in place, in grad mode"),
        ("vllm", PLAIN, OURS, PLAIN, 1.6, "times vLLM's host time into new tensors, in grad mode"),
        ("vllm", PLAIN, OURS, RECORDED, 2.6, "times vLLM's host time in grad mode, with autograd"),
    )
    bars = []
    for contender, their_call, name, call, most, what in cases:
        theirs = _timed(host[host.call == their_call], contender)
        theirs = _by(theirs, "cell", "layout").median_us if "cell" in theirs else pd.Series()
        if len(theirs):
            ours = _by(_ours(host[host.call == call], name), "cell", "layout").median_us
            bars.append(_bar(what, ours.reindex(theirs.index) / theirs, most=most))
    return bars


def qk_norm_bars(qk_norm: pd.DataFrame) -> list[Bar]:
    key = "cell", "layout"
    ours = {step: _by(rows, *key) for step, rows in _ours(qk_norm).groupby("step")}
    bars = []
    if "forward" in ours:
        bars.append(_bar("of a copy in forward", ours["forward"].fraction_of_copy, least=LEAST_OF_COPY_NORM))
    both = "forward and backward"
    compiled = fastest_compiled(qk_norm[qk_norm.step == both])
    if both in ours and len(compiled):
        faster = compiled / ours[both].median_us.reindex(compiled.index)
        what = "times as fast as norm and rotation compiled, forward plus backward"
        bars.append(_bar(what, faster, least=LEAST_OVER_COMPILED))
    return bars


def fastest_compiled(qk_norm: pd.DataFrame) -> pd.Series:
    """Microseconds of norm and rotation by torch.compile, by cell and layout; one or two functions, the faster."""
    compiled = pd.concat([_timed(qk_norm, name) for name in ("compiled separate", "compiled together")])
    return compiled.groupby(["cell", "layout"]).median_us.min()


def memory_bars(memory: pd.DataFrame) -> list[Bar]:
    """The bars show a tensor beyond the results. Bytes that torch adds to round the results up do not count."""
    ours = memory[memory.contender.str.contains("ropelab|apply_", regex=True)]
    beyond = (ours.peak_bytes - ours.result_bytes).where(is_right(ours))
    return [
        _bar(f"bytes beyond the results of {name}", beyond[rows.index].set_axis(rows.step), most=ROUNDED_UP)
        for name, rows in ours.groupby("contender", sort=False)
    ]


QUESTIONS: dict[str, tuple[tuple[str, ...], Callable[..., list[Bar]]]] = {
    "Every dense format": (("dense", "formats"), format_bars),
    "Packed sequences": (("packed",), packed_bars),
    "Few tokens, GPU": (("few_tokens",), few_tokens_bars),
    "Few tokens, host": (("host",), host_bars),
    "QK norm and rotation": (("qk_norm",), qk_norm_bars),
    "Memory": (("memory",), memory_bars),
}
"""Each question -> the studies that answer the question, and the bars as a function of the studies' tables."""


def bars(question: str, where: records.Where = records.MEASUREMENTS) -> list[Bar]:
    """The bars of a question of ``QUESTIONS`` from the records that ``records.load_together`` finds.

    Raises:
        Unusable: a record is missing, or cannot be believed.
    """
    studies, function = QUESTIONS[question]
    return function(*(record.frame for record in records.load_together(studies, where)))


def scoreboard(where: records.Where = records.MEASUREMENTS) -> pd.DataFrame:
    """Every bar: columns question, measured, bar, verdict ("met", "missed ...", "not measured"), worst case."""
    rows = []
    for question in QUESTIONS:
        try:
            found = bars(question, where)
        except records.Unusable as error:
            rows.append((question, str(error), "", "not measured", ""))
            continue
        rows += [(question, f"{bar.number} {bar.what}", bar.asked, bar.verdict, bar.where) for bar in found]
    return pd.DataFrame(rows, columns=["question", "measured", "bar", "verdict", "worst case"])


# ---------------------------------------------------------------------------------------------------- helpers


def _bar(what: str, values: pd.Series, *, least: float | None = None, most: float | None = None) -> Bar:
    """The bar for ``values``, indexed by the names of the cases."""
    passes = values >= least if least is not None else values <= most
    lost = values.isna()
    at = lost.argmax() if lost.any() else values.argmin() if least is not None else values.argmax()
    case = values.index[at]
    return Bar(
        what=what,
        worst=float(values.iloc[at]),
        limit=least if least is not None else most,
        at_least=least is not None,
        where=", ".join(case) if isinstance(case, tuple) else str(case),
        cases=len(values),
        missed=int((~passes).sum()),
    )


def _ours(frame: pd.DataFrame, name: str = OURS) -> pd.DataFrame:
    """The rows of ropelab, or of ropelab in place. A row without a right result stays, without a number."""
    need(frame.contender, name)
    rows = frame[frame.contender == name]
    numbers = [name for name in ("median_us", "fraction_of_copy") if name in rows]
    return rows.assign(**{name: rows[name].where(is_right(rows)) for name in numbers})


def _timed(frame: pd.DataFrame, contender: str) -> pd.DataFrame:
    return frame[(frame.contender == contender) & is_right(frame)]


def _by(rows: pd.DataFrame, *key: str) -> pd.DataFrame:
    return rows.set_index(list(key))
