"""The committed record of the identification has no wrong description, and a sample of it is computed again."""

import math
import random

import pytest

from ropelab.conformance.declared import declare
from ropelab.conformance.faults import FAULTS
from ropelab.conformance.identify.evidence import Evidence
from ropelab.conformance.surroundings import Surroundings
from ropelab.study.topics.conformance import identified as record
from ropelab.study.topics.conformance.blind import BLIND
from ropelab.study.topics.conformance.injected import INJECTED
from ropelab.study.topics.conformance.mutations import drawn
from tests.laws.test_identify import one_thread  # noqa: F401

RECORDS = ("catalogue", "pairs_of_faults", "blind", "controls")
LATE = 6.0
"""After the time limit the example, the repair and the facts take at most this many seconds."""
QUICK = 3.0
"""A sample is drawn from the rows that took fewer seconds."""


def test_every_fault_has_a_statement_of_the_injection_and_a_row():
    assert set(INJECTED) == set(record.read("catalogue").fault) <= set(FAULTS)


def test_no_description_of_the_record_is_wrong():
    for name in ("catalogue", "pairs_of_faults", "blind"):
        assert "wrong" not in set(record.read(name).outcome), name
    assert record.read("controls").silent.all()
    assert all((record.read(name).seconds <= record.SECONDS + LATE).all() for name in RECORDS)


def test_enough_of_the_record_is_recovered():
    assert (record.read("catalogue").outcome == "equal").sum() >= 50
    pairs = record.read("pairs_of_faults")
    assert len(pairs) == record.PAIRS and (pairs.outcome == "equivalent").sum() >= 150


def test_the_blind_faults_are_what_they_say():
    """The deviation beside the code of each fault does the same as the code."""
    rows = record.read("blind")
    assert list(rows.fault) == list(BLIND) and len(rows) == 20
    for fault in BLIND.values():
        _same(fault.function, fault.convention, (fault.deviation,), **fault.options)


@pytest.mark.parametrize("number", random.Random(5).sample(range(record.PAIRS), 20))
def test_two_injected_faults_are_what_they_say(number):
    function, convention, injected = drawn(number)
    _same(function, convention, tuple(injected))


def _same(function, convention, deviations, **options):
    declaration, surroundings = declare(convention, **options), Surroundings()
    with surroundings.ours():
        evidence = Evidence(declaration.subject(function, surroundings), declaration.sizes, math.inf)
        assert evidence.wrong(()) and not evidence.wrong(deviations)


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_the_catalogue_is_computed_again(seed):
    rows = record.read("catalogue")
    quick = rows[(rows.seconds < QUICK) & (rows.outcome == "equal") & (rows.same_as == "")]
    quick = quick[[not FAULTS[name].triton for name in quick.fault]]
    row = quick.iloc[random.Random(seed).randrange(len(quick))]
    (found,) = record.catalogue([row.fault])
    assert (found["outcome"], found["recovered"]) == (row.outcome, row.recovered)


@pytest.mark.parametrize("number", random.Random(4).sample(range(record.PAIRS), record.PAIRS // 20))
def test_a_row_of_the_pairs_is_computed_again(number):
    rows = record.read("pairs_of_faults").set_index("number")
    (found,) = record.pairs_of_faults([number])
    assert (found["outcome"], found["recovered"]) == (rows.outcome[number], rows.recovered[number])
