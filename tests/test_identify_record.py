"""The committed record of the identification has no wrong description, and a sample of it is computed again."""

import random

import pytest

from ropelab.conformance.faults import FAULTS
from ropelab.study.topics.conformance import identified as record
from ropelab.study.topics.conformance.injected import INJECTED
from tests.test_identify import one_thread  # noqa: F401

QUICK = 3.0
"""A sample is drawn from the rows that took fewer seconds."""


def test_every_fault_has_a_statement_of_the_injection_and_a_row():
    assert set(INJECTED) == set(FAULTS) == set(record.read("catalogue").fault)


def test_no_description_of_the_record_is_wrong():
    assert "wrong" not in set(record.read("catalogue").outcome)
    assert record.read("controls").silent.all()


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_the_catalogue_is_computed_again(seed):
    rows = record.read("catalogue")
    quick = rows[(rows.seconds < QUICK) & (rows.outcome == "equal") & (rows.same_as == "")]
    quick = quick[[not FAULTS[name].triton for name in quick.fault]]
    row = quick.iloc[random.Random(seed).randrange(len(quick))]
    (found,) = record.catalogue([row.fault])
    assert (found["outcome"], found["recovered"]) == (row.outcome, row.recovered)


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_the_pairs_is_computed_again(seed):
    rows = record.read("pairs_of_faults")
    quick = rows[(rows.seconds < QUICK) & (rows.outcome == "equivalent")]
    row = quick.iloc[random.Random(seed).randrange(len(quick))]
    (found,) = record.pairs_of_faults([int(row.number)])
    assert (found["outcome"], found["recovered"]) == (row.outcome, row.recovered)
