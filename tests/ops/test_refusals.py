"""One wrong argument is refused by name, whatever the rest of the call is: it takes a place in a random valid call.

Nothing that was given has changed afterwards. Some calls were right once before, so that what is known of their shapes
cannot hide the change. A call that hangs ends after `faulthandler_timeout`.
"""

import inspect

import pytest
import torch

import ropelab
from tests.ops.hostile_adapters import SOME_FIT, hostile, outcome

pytest.importorskip("hypothesis")

from hypothesis import given, note, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.ops.strategies import rotations  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_operations")
MAY_FIT = {*SOME_FIT, "below 0", "beyond"}
"""Hostile values that some random calls take: the contents of positions without a token, and negative offsets."""


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function in (ropelab.apply_rope, ropelab.apply_qk_norm_rope)
        for name in inspect.signature(function).parameters
        if name not in ("axes", "frequencies")  # which have no place beside tables and positions of one axis
    ],
)
def test_one_wrong_argument_is_refused(function, name):
    parameters = inspect.signature(function).parameters

    @settings(max_examples=60)
    @given(st.data())
    def check(data):
        case = data.draw(rotations(with_k=True))
        weights = {x: torch.ones(case.q.shape[-1]) for x in ("q_weight", "k_weight")}
        call = {"q": case.q, "k": case.k, "inverse": False, "inplace": False, "eps": 1e-6} | weights | case.options
        call = {x: value for x, value in call.items() if x in parameters}
        if name not in call:  # no positions in this case
            return
        values = {what: x for what, x in hostile(call[name]).items() if x is not None or parameters[name].default}
        if data.draw(st.booleans()):
            function(**call)
        what = data.draw(st.sampled_from(sorted(values)))
        note(f"{name} = {what}")
        found = outcome(function, call | {name: values[what]})
        assert found == "refused" or (what.partition(" in place")[0] in MAY_FIT and found == "right"), found

    check()
