"""Compilers see what every operator is: no graph breaks, and the operators of the dispatcher are what they claim."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops.specs import CASES, FLOAT8, OPERATORS, call_of, copied, recorded, same

pytestmark = pytest.mark.usefixtures("torch_backend")


class Recorded(TorchDispatchMode):
    """Notes each operator of ropelab that is called, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ropelab":
            self.calls.append((function, tree_map_only(torch.Tensor, lambda x: x.detach().clone(), args)))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("name", "where"), [case for case in CASES if case[1] in ("positions", "offsets", "axes")])
def test_operators_are_what_the_dispatcher_expects(name, where):
    """Those of the forward and of the backward."""
    with Recorded() as seen:
        recorded(name, call_of(name, where))
    assert seen.calls
    for operator, arguments in seen.calls:
        has_8_bits = any(isinstance(x, torch.Tensor) and x.dtype == FLOAT8 for x in tree_leaves(arguments))
        # the schema's test multiplies, and 8-bit floats have no product
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, arguments, test_utils=tests[2:] if has_8_bits else tests)


COMPILED = [(name, where) for name, where in CASES if where == "positions" or name == "apply_rope"]


@pytest.mark.parametrize(("name", "where"), COMPILED)
def test_compiles_once_for_any_number_of_tokens(name, where):
    """Without a graph break, and with gradients."""
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes a second to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(OPERATORS[name].function, fullgraph=True, dynamic=True, backend=counter)
    compared = 1 if OPERATORS[name].options.get("consume") else None  # what is left in q is nobody's
    frames = set()
    for tokens in (7, 9, 11):  # no other size of the first call is the same
        call = call_of(name, where, tokens=tokens)
        expected = recorded(name, copied(call))
        assert same(recorded(name, call, function)[:compared], expected[:compared])
        frames.add(counter.frame_count)
    assert len(frames) == 1
