"""One wrong argument is refused by name, whatever the rest of the call is: it takes a place in a random valid call.

Only TypeError or ValueError is raised, ``name: expected ..., got ...``, which names an argument of the call. Nothing
that was given has changed afterwards. Some calls were right once before, so that what is known of their shapes cannot
hide the change. A call that hangs ends after `faulthandler_timeout`.
"""

import inspect
import re

import numpy as np
import pytest
import torch

import ropelab
from ropelab.layout.seq_format import SEQ_AXIS

pytest.importorskip("hypothesis")

from hypothesis import given, note, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.ops.strategies import Rotation, rotations  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_operations")

# The values that no argument of the kind can have.
NOTHING = (None, object(), "x", b"x", 1j, float("nan"), {}, [], torch.float32)
NO_TENSOR = (*NOTHING, 1, 1.5, [1.0, 2.0], np.zeros(3))
NO_INTEGER = (*NOTHING, 1.0, 1.5, float("inf"), 1e300, True, np.bool_(True), np.float32(1), [1], (1, 2))
NO_FLAG = (None, "no", "", 0, 1, 1.0, 2, [], [False], object(), torch.tensor(True), torch.tensor([True, False]))
NO_CHOICE = (*NOTHING, 1, True, "", "neox", "BSHD", "split_half ", ["bshd"], ("split_half",))
NO_POSITIONS = (
    torch.zeros(2, 3), torch.zeros(2, 3).bool(), torch.zeros(2, 3).short(), torch.zeros(()).long(),
    torch.zeros(2, 1, 1, 1).long(), torch.zeros(2, 3, dtype=torch.int64).to_sparse(), torch.zeros(7, 7).long(),
    torch.zeros(11).int(),
)  # fmt: skip
FAR = (2**31, -(2**31) - 1, 2**62, 2**63, -(2**63), 10**30)


def no_features(valid: torch.Tensor) -> tuple:
    """The values that cannot take the place of the floating tensor ``valid``."""
    return (
        *NO_TENSOR, valid[None, None], valid.long(), valid.bool(), valid.to(torch.complex64), valid.to_sparse(),
        valid.to("meta"), valid.to(torch.float8_e4m3fn),
    )  # fmt: skip


def invalid_for(case: Rotation) -> dict[str, tuple]:
    """Values that each argument of `ropelab.apply_rope` cannot have beside the others of the case, which has a k."""
    q, k, cos = case.q, case.k, case.options["cos"]
    rows, wide = cos.shape[-2], torch.zeros(cos.shape[-2], q.shape[-1] + 2)
    wider = k.new_zeros(*k.shape[:-1], k.shape[-1] + 1)
    invalid = {
        "q": no_features(q),
        "k": (*no_features(k)[1:], k.new_zeros(k.shape[0] + 1, *k.shape[1:]), wider),
        "cos": (*no_features(cos), wide),
        "sin": (*no_features(case.options["sin"]), wide),
        "layout": NO_CHOICE,
        "out_layout": NO_CHOICE[1:],
        "seq_format": NO_CHOICE,
        "rotary_slice": (
            *NOTHING[1:], 4, True, (0,), (0, 2, 4), (0, 1), (2, 0), (-2, 2), (0, q.shape[-1] + 2), (0.0, 2.0),
            ("0", "2"), (None, None), (0, 2**70), torch.tensor([0, 1]), (0, float("nan")),
        ),
        "inverse": NO_FLAG,
        "inplace": NO_FLAG,
        "frequencies": (*NO_TENSOR[1:], ropelab.rotary_frequencies(2), torch.zeros(1, 3)),
    }  # fmt: skip
    if "positions" in case.options:
        invalid["positions"] = (*NO_TENSOR[1:], *NO_POSITIONS)
        invalid["offsets"] = (1, torch.zeros(1).long(), 1.5, "x", True)  # nothing beside positions
    else:
        beyond = (rows, -rows) if q.shape[SEQ_AXIS[case.options["seq_format"]]] else ()
        invalid["offsets"] = (*NO_INTEGER, *NO_POSITIONS, *FAR, *beyond)
    return invalid


def invalid_for_qk_norm(case: Rotation) -> dict[str, tuple]:
    """`invalid_for` for `ropelab.apply_qk_norm_rope`; `weights` are the valid weights."""
    rope = {name: values for name, values in invalid_for(case).items() if name in QK_NORM}
    weight = weights(case)["q_weight"]
    no_weight = (*no_features(weight), torch.ones(len(weight) + 1))
    no_eps = (None, object(), "1", b"1", 1j, True, [1.0], {}, torch.ones(2), float("nan"), float("inf"), -1e-6)
    return rope | {"q_weight": no_weight, "k_weight": (*no_weight, weight.half()), "eps": no_eps}


def weights(case: Rotation) -> dict[str, torch.Tensor]:
    return {name: torch.ones(case.q.shape[-1]) for name in ("q_weight", "k_weight")}


ROPE = list(inspect.signature(ropelab.apply_rope).parameters)
QK_NORM = list(inspect.signature(ropelab.apply_qk_norm_rope).parameters)


def check_refused(function, arguments: dict, name: str, value) -> None:
    """The call with ``value`` for one of its arguments raises the right error."""
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**arguments | {name: value})
    said = str(caught.value)
    named = re.match(r"(\w+)(?:\[\d+\])?: expected .*\bgot ", said, re.DOTALL)
    assert named and named[1] in inspect.signature(function).parameters, f"{type(caught.value).__name__}: {said}"
    assert all(torch.equal(arguments[key], x) for key, x in before.items()), "half done"


@pytest.mark.parametrize(
    ("function", "name"), [("apply_rope", name) for name in ROPE] + [("apply_qk_norm_rope", name) for name in QK_NORM]
)
def test_one_wrong_argument_is_refused(function, name):
    @settings(max_examples=60)
    @given(st.data())
    def check(data):
        case = data.draw(rotations(with_k=True))
        arguments = {"q": case.q, "k": case.k} | case.options
        invalid = invalid_for(case)
        if function == "apply_qk_norm_rope":
            arguments = {key: x for key, x in arguments.items() if key in QK_NORM} | weights(case)
            invalid = invalid_for_qk_norm(case)
        if name not in invalid:  # no positions in this case
            return
        if data.draw(st.booleans()):
            getattr(ropelab, function)(**arguments)
        value = invalid[name][data.draw(st.integers(0, len(invalid[name]) - 1))]
        note(f"{name} = {value!r}")
        check_refused(getattr(ropelab, function), arguments, name, value)

    check()
