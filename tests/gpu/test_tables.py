"""Tables that are no times: each is made on a GPU, and with ``pytest -m gpu --record`` it becomes the record."""

from functools import partial

import pytest

from ropelab.bench import peers, records
from ropelab.bench.unavailable import Unavailable
from ropelab.study.engine import measure, registered, results

TABLES = {name: study for name, study in registered.all_studies().items() if not study.timed}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_made(name, pytestconfig):
    study, recording = TABLES[name], pytestconfig.getoption("record")
    made = results.run(partial(study, smoke=not recording))
    if made.reason:
        raise Unavailable(made.reason)
    assert not made.error, made.error
    assert len(made.found)
    if recording:
        assert study.other_rows(made.found) == ""
        _, not_run = peers.available(peers.PEERS)
        measure.record(name, study, made, records.MEASUREMENTS, smoke=False, not_run=not_run)
