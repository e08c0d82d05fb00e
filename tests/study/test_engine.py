"""The engine of claims and verdicts, on a document made up here; and the completeness of the documents' claims."""

import math
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ropelab.bench import records, rows
from ropelab.bench.unavailable import Unavailable
from ropelab.study.engine import computed, judging, ledger, noise, repeats, words
from ropelab.study.engine.claims import documents, load_claims
from ropelab.study.engine.ledger import disagreements
from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import FAILS, HOLDS, Basis, Outcome, Quantifier, Verdict, fact, untold

DOCUMENT = """
document = "made up"
package = "tests.made_up"
[[claim]]
id = "MU-01"
by = "author"
statement = "It is twice as fast."
quote = "2x"
quantifier = "one"
basis = "package"
needs = "a stopwatch"
[[claim]]
id = "MU-02"
by = "reviewer"
statement = "It is always right."
quote = "always"
quantifier = "all"
basis = "fact"
needs = "a definition"
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Claims MU-01 (with a rule on evidence ``made_up_times``) and MU-02 (without a rule)."""
    load_claims()  # the documents register their rules when they are first imported, and these are to stay
    for module, name in ((ledger, "_RULES"), (computed, "_COMPUTATIONS")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))

    @ledger.rule("MU-01", "made_up_times")
    def twice(claim, times):
        speedup = noise.time(times.iloc[0]) / noise.time(times.iloc[1])
        return judging.size(speedup, judging.printed(2.0, 0)).with_text(f"{speedup.value:.1f}x", "", "on a bench")

    (tmp_path / "made_up.toml").write_text(DOCUMENT)
    return tmp_path


def times(old, new):
    return pd.DataFrame({"contender": ["old", "new"], "median_us": [float(old), float(new)]})


def claims(folder):
    (found,) = documents(folder)
    return found.claims


def test_runs_that_were_timed_by_different_code_tell_nothing_about_noise(monkeypatch):
    table = pd.DataFrame({"cell": ["a"], "contender": ["flash_attn"], "median_us": [100.0]})
    slower, timing = table.assign(median_us=130.0), "ropelab.bench.timing"
    history = [("1", {timing: "old"}, slower), ("2", {timing: "new"}, table), ("3", {timing: "new"}, table)]
    monkeypatch.setattr(repeats, "_git", lambda *arguments: "data/measurements/gpu/dense.csv")
    monkeypatch.setattr(repeats, "_history", lambda path: history)
    assert repeats.measured("data/measurements/gpu").distance.tolist() == [0.0]
    assert repeats.measured("data/measurements/gpu").changed_distance.max() > 0.2
    history[0] = ("1", {timing: "new"}, slower)
    assert repeats.measured("data/measurements/gpu").distance.max() > 0.2
    history[0] = ("1", {timing: "new", "flash-attn 2.8": "another"}, slower)
    history[1] = ("2", {timing: "new", "flash-attn 2.8": "one"}, table)
    assert repeats.measured("data/measurements/gpu").distance.max() == 0.0  # other code of the package


@pytest.mark.parametrize(
    "old, new, outcome",
    [(4, 2, Outcome.HOLDS), (4, 1.5, Outcome.LARGER), (4, 3, Outcome.SMALLER), (2, 4, Outcome.FAILS),
     (4, 3.99, Outcome.FAILS)],
)  # fmt: skip
def test_the_verdict_follows_the_evidence(made_up, old, new, outcome):
    find = partial(ledger.find_evidence, given={"made_up_times": times(old, new)})
    verdict, pieces = ledger.judge(claims(made_up)[0], find)
    assert (verdict.outcome, verdict.basis, verdict.remarks) == (outcome, Basis.PACKAGE, ("on a bench",))
    assert [piece.source for piece in pieces] == ["given by the caller"]


@pytest.mark.parametrize("given", [None, {"made_up_times": pd.DataFrame()}])
def test_without_evidence_nothing_is_told(made_up, given):
    verdict, pieces = ledger.judge(claims(made_up)[0], partial(ledger.find_evidence, given=given))
    assert verdict.outcome == Outcome.UNTOLD and pieces == []
    assert "a stopwatch" in verdict.needs and "made_up_times" in verdict.needs


def test_a_rule_that_lacks_evidence_raises_what_would_tell(made_up):
    @ledger.rule("MU-01", "made_up_times")
    def twice(claim, times):
        judging.needed(times[times.contender == "another"], "the time of another")

    verdict, _ = ledger.judge(claims(made_up)[0], partial(ledger.find_evidence, given={"made_up_times": times(4, 2)}))
    assert (verdict.outcome, verdict.needs, verdict.basis) == (Outcome.UNTOLD, "the time of another", Basis.PACKAGE)


def test_evidence_is_computed_where_it_can_be(made_up):
    @computed.evidence("made_up_times", "a thought experiment")
    def compute():
        return times(4, 2)

    verdict, pieces = ledger.judge(claims(made_up)[0])
    assert (verdict.outcome, verdict.measured, pieces[0].source) == (Outcome.HOLDS, "2.0x", "a thought experiment")


def test_evidence_that_cannot_be_computed_is_read_from_the_record(made_up):
    @computed.evidence("made_up_times", "a thought experiment")
    def compute():
        raise Unavailable("no stopwatch")

    assert ledger.judge(claims(made_up)[0])[0].outcome == Outcome.UNTOLD
    written = records.write("made_up_times", times(4, 2), made_up)
    verdict, pieces = ledger.judge(claims(made_up)[0], partial(ledger.find_evidence, records=made_up))
    assert verdict.outcome == Outcome.HOLDS and pieces[0].source == f"record, {written.footer}"


def test_a_claim_without_a_rule_is_an_error(made_up):
    with pytest.raises(ValueError, match="MU-02: expected a test in its file or a rule"):
        ledger.judge(claims(made_up)[1])


def test_names_that_do_not_exist(made_up):
    with pytest.raises(ValueError, match="document: expected one of .*'made_up'.*'three'"):
        load_claims("three", made_up)
    with pytest.raises(ValueError, match="only: expected ids of claims, got .'XX-01'"):
        ledger.ledger({}, only=["XX-01"])


@pytest.mark.parametrize(
    "wrong, message",
    [('package = "tests.made_up"', "missing: ..package"), ('quantifier = "all"\n', "MU-02: expected .*quantifier")],
)
def test_a_file_of_claims_is_complete(tmp_path, wrong, message):
    (tmp_path / "one.toml").write_text(DOCUMENT.replace(wrong, ""))
    with pytest.raises(ValueError, match=f"one.toml: {message}|one.toml: expected .* {message}"):
        documents(tmp_path)


# ------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    "low, value, high, stated, expected",
    [
        (1.9, 2.0, 2.1, 2.0, "holds"),
        (1.9, 1.95, 1.996, 2.0, "holds"),  # the printed 2.00 may be 1.995
        (1.7, 1.8, 1.9, 2.0, "smaller than stated (0.85 times the effect)"),
        (2.1, 4.0, 7.0, 2.0, "larger than stated (2.00 times the effect)"),
        (1.69, 2.0, 2.38, 2.0, "holds"),  # just narrow enough: half of the stated effect
        (1.67, 2.0, 2.38, 2.0, "cannot be told"),  # too wide to tell
        (0.9, 1.0, 2.1, 2.0, "cannot be told"),  # neither size nor "no effect" is excluded
        (1.2, 1.25, 1.3, 2.0, "smaller than stated (0.32 times the effect)"),
        (0.98, 1.0, 1.02, 2.0, "does not hold"),
        (0.98, 1.0, 1.41, 2.0, "does not hold"),
        (0.98, 1.0, 1.42, 2.0, "cannot be told"),  # half of the effect is in the interval, and "no effect" too
        (0.5, 0.6, 0.7, 2.0, "does not hold"),  # the other way round
        (0.8, 0.83, 0.86, 0.7, "smaller than stated (0.52 times the effect)"),
    ],
)
def test_the_size_of_an_effect(low, value, high, stated, expected):
    assert judging.size(Interval(low, value, high), judging.printed(stated, 2)).words == expected


@pytest.mark.parametrize(
    "low, value, high, expected",
    [
        (1.2, 1.3, 1.40, "does not hold"),  # less than half of the effect
        (1.3, 1.35, 1.42, "cannot be told"),
        (1.42, 1.5, 1.6, "smaller than stated (0.58 times the effect)"),
        (3.8, 4.0, 4.2, "cannot be told"),
        (4.01, 4.2, 4.4, "does not hold"),  # more than twice the effect
    ],
)
def test_a_stated_number_is_missed_on_the_gpu_of_its_document(low, value, high, expected):
    assert judging.size(Interval(low, value, high), judging.printed(2.0, 2), own_gpu=True).words == expected


NUMBERS = st.floats(0.05, 20)


@given(st.lists(NUMBERS, min_size=3, max_size=3), NUMBERS, st.floats(1, 1.02), st.booleans())
def test_a_verdict_does_not_depend_on_which_way_up_a_ratio_is_written(found, stated, rounded, own_gpu):
    def turned(one):
        return Interval(1 / one.high, 1 / one.value, 1 / one.low)

    effect = Interval(*sorted(found))
    printed = Interval(stated / rounded, stated, stated * rounded)
    assume(abs(math.log(stated)) > 0.01)
    edges = [*found, *(a / b for a in found for b in (printed.low, printed.high))]
    assume(all(abs(math.log(x)) > 1e-6 for x in edges))  # rounding may turn what lies on a limit

    other = judging.size(turned(effect), turned(printed), own_gpu=own_gpu)
    assert judging.size(effect, printed, own_gpu=own_gpu).outcome is other.outcome
    assert judging.above(effect, stated) == judging.below(turned(effect), 1 / stated)
    assert judging.near(effect, stated) == judging.near(turned(effect), 1 / stated)


@pytest.mark.parametrize(
    "found, strict, counted",
    [
        ([True, True], "holds", "holds"),
        ([True, False], "does not hold", "holds in 1 of 2 cells"),
        ([False, False], "does not hold", "does not hold"),
        ([True, True, None], "holds (1 cell undecided)", "holds (1 cell undecided)"),
        ([True, None], "cannot be told", "cannot be told"),  # most cells must be decided
        ([None, None], "cannot be told", "cannot be told"),
        ([True, False, None], "does not hold (1 cell undecided)", "holds in 1 of 2 cells (1 cell undecided)"),
        ([False, None, None], "does not hold (2 cells undecided)", "cannot be told"),
        ([], "cannot be told", "cannot be told"),
    ],
)
def test_cells_and_the_quantifier(found, strict, counted):
    """Undecided cells count nowhere, and the verdict has their number."""
    for quantifier in (Quantifier.ALL, Quantifier.ONLY, Quantifier.NEVER):
        assert judging.counted(found, quantifier).words == strict
    assert judging.counted(found, Quantifier.CELLS).words == counted


def test_sizes_of_cells():
    """A cell of another size is no failure."""
    other, larger = Verdict(Outcome.SMALLER, sizes=(0.8, 0.8)), Verdict(Outcome.LARGER, sizes=(1.5, 1.5))
    assert judging.counted([HOLDS, HOLDS], Quantifier.ALL) == HOLDS
    assert judging.counted([HOLDS, other], Quantifier.ALL).words == "smaller than stated (0.80 times the effect)"
    assert judging.counted([larger, other], Quantifier.ALL).words == (
        "smaller and larger than stated (0.80 to 1.50 times the effect)"
    )
    assert judging.counted([HOLDS, FAILS], Quantifier.ALL) == FAILS
    assert judging.counted([HOLDS, other, FAILS], Quantifier.CELLS).words == (
        "holds in 1, smaller than stated in 1 of 3 cells"
    )
    assert judging.counted([larger, larger, other, FAILS, None], Quantifier.CELLS).words == (
        "larger than stated in 2, smaller than stated in 1 of 4 cells (1 cell undecided)"
    )


@pytest.mark.parametrize(
    "holding, failing, undecided, outcome",
    [(3, 2, 0, "holds"), (4, 2, 1, "holds (1 cell undecided)"), (3, 2, 1, "cannot be told"), (2, 2, 0, "does not hold"),
     (2, 2, 1, "cannot be told"), (2, 4, 1, "does not hold (1 cell undecided)")],
)  # fmt: skip
def test_most_cells_are_more_than_half_of_all(holding, failing, undecided, outcome):
    found = [True] * holding + [False] * failing + [None] * undecided
    assert judging.counted(found, Quantifier.MOST).words == outcome


@pytest.mark.parametrize(
    "low, value, high, outcome",
    [
        (1.06, 1.1, 1.2, "holds"),
        (1.04, 1.1, 1.26, "holds"),  # the ends are rounded to multiples of 0.05
        (1.02, 1.1, 1.26, "cannot be told"),
        (1.10, 1.2, 1.28, "cannot be told"),
        (1.28, 1.3, 1.32, "larger than stated (1.18 times the effect)"),
        (0.95, 0.97, 0.99, "does not hold"),
    ],
)
def test_a_stated_range(low, value, high, outcome):
    ends = (Interval(end - 0.025, end, end + 0.025) for end in (1.05, 1.25))
    assert judging.within(Interval(low, value, high), *ends).words == outcome


def test_no_effect_is_one_within_five_percent():
    assert judging.near(Interval(0.96, 1.0, 1.04)) is True and judging.near(Interval(0.94, 1.0, 1.04)) is None
    assert judging.near(Interval(1.051, 1.1, 1.2)) is False


def test_thresholds_within_the_noise_decide_nothing():
    assert judging.above(Interval(1.1, 1.2, 1.3), 1.0) is True and judging.below(Interval(1.1, 1.2, 1.3), 1.0) is False
    assert judging.above(Interval(0.9, 1.2, 1.3), 1.0) is None and judging.below(Interval(0.9, 0.95, 1.3), 1.0) is None


def test_intervals_of_times():
    row = pd.Series({"median_us": 100.0, "q20_us": 97.0, "q80_us": 100.5})
    assert noise.time(row) == Interval(97.0, 100.0, 101.0)  # the floor of 1 % where the samples lie closer
    assert noise.time(pd.Series({**row, "between_runs": 0.25})) == Interval(80.0, 100.0, 125.0)
    assert noise.time(pd.Series({"median_us": 101.0})) == Interval(100.0, 101.0, 102.01)
    ratio = Interval(99.0, 100.0, 101.0) / Interval(49.5, 50.0, 50.5)
    assert (round(ratio.low, 2), ratio.value, round(ratio.high, 2)) == (1.96, 2.0, 2.04)


def test_what_two_times_of_a_run_have_in_common_is_no_noise_of_their_ratio():
    over, under = (pd.Series({"median_us": x, "between_runs": 0.25, "between_ratios": 0.03}) for x in (200.0, 100.0))
    assert noise.ratio(over, under) == Interval(2 / 1.03, 2.0, 2 * 1.03)
    wide = pd.concat([over, pd.Series({"q20_us": 180.0, "q80_us": 210.0})])
    assert noise.ratio(wide, under) == Interval(1.8, 2.0, 2.1)
    assert noise.ratio(over.drop("between_ratios"), under.drop("between_ratios")) == Interval(2 / 1.01, 2.0, 2.02)


def test_the_distance_of_two_runs():
    first = pd.DataFrame({"cell": ["a", "b", "a"], "contender": ["flash_attn", "flash_attn", "ropelab"],
                          "median_us": [100.0, 10.0, 5.0]})  # fmt: skip
    second = first.assign(median_us=[102.0, 9.0, 50.0])
    apart = repeats.distances(first, second)
    assert apart.distance.round(3).tolist() == [0.02, 0.111]  # ours changes from run to run; one contender has no ratio
    slower = first.assign(contender=["flash_attn", "liger", "ropelab"], cell="a")
    ratios = repeats.distances(slower, slower.assign(median_us=[110.0, 12.1, 5.0])).query("what == 'ratio'")
    assert ratios.distance.round(3).tolist() == [0.1]
    found = repeats.between_runs("te_kernels", first)
    assert (found > 0.005).all() and (found < 0.05).all()
    assert (repeats.between_runs("a study that was measured once", first) > 0.005).all()
    assert repeats.between_runs("dense", first[:0].assign(timer=pd.Series(dtype=str))).dtype == float
    timed = pd.DataFrame({"timer": ["graph", "do_bench"]})
    assert repeats.between_runs("sglang_protocols", timed).pipe(lambda x: x[0] < 0.1 < 1 < x[1])
    once = repeats.between_runs("a study that was measured once", timed)
    assert once[0] < 0.1 < 1 < once[1]


@pytest.mark.parametrize(
    "make",
    [lambda: Verdict(Outcome.LARGER), lambda: Verdict(Outcome.HOLDS, sizes=(2, 2)), lambda: Verdict(Outcome.SOME_CELLS),
     lambda: Verdict(Outcome.UNTOLD)],
)  # fmt: skip
def test_a_verdict_is_complete(make):
    with pytest.raises(ValueError, match="expected"):
        make()


def test_facts():
    assert fact(True) is HOLDS and fact(False) is FAILS and untold("a GPU").needs == "a GPU"


# ----------------------------------------------------------------------------------------------------- the documents


def test_claims_are_complete_and_unique():
    found = load_claims()
    ids = [claim.id for claim in found]
    assert len(set(ids)) == len(ids)
    assert all(claim.statement and claim.quote and claim.needs for claim in found)
    assert all((claim.id in ledger._RULES) != bool(claim.test) or (claim.beyond and not claim.test) for claim in found)


def test_disagreements_are_told():
    row = dict.fromkeys(ledger.COLUMNS, "") | {"id": "MU-01", "on_gpu": True, "measured": "2x"}
    outcomes = Outcome.HOLDS, Outcome.FAILS, Outcome.UNTOLD
    one, other, silent = (pd.DataFrame([row | {"outcome": name, "words": name}]) for name in outcomes)
    found = disagreements({"a": one, "b": other})
    assert found.id.tolist() == ["MU-01"] and found.a[0] == "holds: 2x" and found.b[0] == "does not hold: 2x"
    assert disagreements({"a": one, "b": one}).empty and disagreements({}).empty
    assert disagreements({"a": one, "b": silent}).empty
    third = disagreements({"a": one, "b": silent, "c": other})
    assert third.b[0] == "cannot be told: 2x" and third.c[0] == "does not hold: 2x"


# ------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    "values, spec, said",
    [
        ([0.931, 0.978], ".2f", "0.93 to 0.98"),
        ([0.931, 0.929], ".2f", "0.93"),
        (pd.Series([3, 1]), "", "1 to 3"),
        ([1.0, float("nan")], ".1f", "1.0"),
        ([Interval(1, 2, 3), Interval(4, 5, 6)], ".0f", "2 to 5"),
        (pd.Series([], dtype=float), ".2f", ""),
    ],
)
def test_ranges_are_worded(values, spec, said):
    assert words.value_range(values, spec) == said


def test_lists_are_worded():
    assert words.listed([96, 128, 96]) == "96, 128" and words.listed([]) == "none"
    assert words.followed("not in ", iter(["a", "b"])) == "not in a, b" and words.followed("not in ", []) == ""


def test_the_numbers_of_a_quotation(made_up):
    claim = replace(claims(made_up)[0], quote="0.3.0 for nseq=2401 (~12 iterations), ~3,072 entries (e.g., 80), 1.25x")
    assert claim.numbers == ["0.3.0", "2401", "12", "3072", "80", "1.25"]


def test_rows_that_are_right_and_timed():
    frame = pd.DataFrame({"status": ["ok", "ok", "failed: x"], "median_us": [1.0, float("nan"), 3.0]})
    assert rows.is_right(frame).tolist() == [True, True, False] and rows.timed(frame).index.tolist() == [0]
    assert rows.timed(frame.drop(columns="status")).index.tolist() == [0, 2]
