"""The tables that the notebook on performance draws from the records, on records made up here."""

import pandas as pd
import pytest

from ropelab.study.topics.performance import comparison, dense
from tests.study.sentences import states


def frame(**times):
    """One cell, forward; a time in microseconds or a status for each contender."""
    cell = {"cell": "1x1", "layout": "split_half", "direction": "forward"}
    rows = []
    for name, time in times.items():
        timed = isinstance(time, float)
        rows.append({
            **cell, "contender": name.replace("_", " "), "status": "ok" if timed else time,
            "median_us": time if timed else None, "in_place": "place" in name,
            "fraction_of_copy": 10 / time if timed else None,
        })  # fmt: skip
    return pd.DataFrame(rows).assign(median_us=lambda f: f.median_us.astype(float))


def test_peers_are_held_against_the_call_of_their_kind():
    times = frame(ropelab=10.0, ropelab_in_place=8.0, peer=9.0, peer_in_place=9.0)
    slower = comparison.against_peers(times).set_index("contender").slower
    assert slower.to_dict() == {"peer": pytest.approx(0.9), "peer in place": pytest.approx(9 / 8)}


def test_an_in_place_peer_without_counterpart_meets_the_ordinary_call():
    slower = comparison.against_peers(frame(ropelab=10.0, peer_in_place=9.0)).slower
    assert slower.tolist() == pytest.approx([0.9])


def test_copies_and_wrong_results_are_not_compared():
    times = frame(ropelab=10.0, peer="wrong: off", **{"copy: copy ": 9.0})
    times.contender = times.contender.str.replace("copy: copy ", "copy: copy_")
    assert comparison.against_peers(times).empty


def test_numbers_in_tables():
    assert [comparison.number(value) for value in (1234.56, 3.4e-8, 7, "ran")] == ["1,235", "3.4e-08", "7", "ran"]


def test_the_sentence_of_the_readme_follows_the_record():
    times = frame(ropelab=10.5, peer=10.0, slow_peer=21.0).assign(bar=0.95)
    assert states(dense.shortfall_sentence(times.assign(bar=0.96)), 1, 1, 0.952, 0.96)
    assert dense.below_their_bar(times).empty and len(dense.below_their_bar(times.assign(bar=0.96))) == 1
