"""A wrong call is refused by the name of a parameter of the function that was called, before anything is written.

Public functions and adapters take generated calls: each argument of a valid call becomes a value that cannot be meant.
"""

import itertools

import pytest
import torch

import ropelab
from ropelab.interop import fairseq2
from ropelab.kernels import HAS_TRITON
from tests.ops.adapter_calls import ADAPTERS, CONFIG, INNER
from tests.ops.boundaries import BOUNDARIES
from tests.ops.hostile_adapters import (
    CONTEXTS,
    OF_ANOTHER_TYPE,
    SOME_FIT,
    WithoutMemory,
    aliased,
    calls,
    changed,
    contents,
    copied,
    equivalents,
    outcome,
    tensors,
)
from tests.ops.public_calls import OPERATIONS, PUBLIC, functions
from tests.ops.specs import same
from tests.support import forget

CALLS = PUBLIC | ADAPTERS | INNER


@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_value_is_refused_by_name_and_nothing_is_written(torch_backend, name):
    wrong, function = [], CALLS[name].function
    assert outcome(function, CALLS[name].arguments()) == "right"
    for argument, what, call in calls(CALLS[name]):
        kind = what.partition(" in place")[0]
        named = argument if kind in OF_ANOTHER_TYPE else None
        found = outcome(function, call, argument=named, finite=kind in ("huge", "minus huge", "tiny"))
        if found != "refused" and not (kind in SOME_FIT and found == "right"):
            wrong.append(f"{argument} = {what}: {found}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_boundary_is_refused_by_name_and_nothing_is_written(torch_backend, monkeypatch, name):
    """Also where others have prepared the call."""
    wrong, (function, arguments, _) = [], CALLS[name]
    for remembered, row in itertools.product((False, True), BOUNDARIES[name]):
        (changes, named), call = row, arguments()
        forget(monkeypatch)
        if remembered:
            function(**arguments())
        call |= {x: value(call.get(x)) if callable(value) else value for x, value in changes.items()}
        if (found := outcome(function, call, argument=named)) != "refused":
            wrong.append(f"row {next(i for i, x in enumerate(BOUNDARIES[name]) if x is row)}, {[*row[0]]}: {found}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


def visible(found):
    """The tensors of a result, also of a module or a rope."""
    if isinstance(found, (tuple, list)):
        return [x for part in found for x in visible(part)]
    if isinstance(found, ropelab.PackedSequences):
        return [found.positions]
    if isinstance(found, fairseq2.BatchLayout):
        return [found.position_indices]
    if isinstance(found, (torch.Tensor, int, float)):
        return [found if isinstance(found, torch.Tensor) else torch.tensor(found, dtype=torch.float64, device="cpu")]
    return [] if found is None else list(found.tables(5, device="cpu"))


def outcomes(name, call):
    """What a call returns, and what it leaves in its tensors."""
    return [*visible(CALLS[name].function(**call)), *tensors(call).values()]


@pytest.mark.parametrize("name", CALLS)
def test_a_value_written_in_another_way_is_the_same(torch_backend, name):
    expected = visible(CALLS[name].function(**CALLS[name].arguments()))
    for argument, value in CALLS[name].arguments().items():
        for other in equivalents(value) if argument != "frequencies" else ():
            call = CALLS[name].arguments() | {argument: other}
            assert same(visible(CALLS[name].function(**call)), expected), f"{argument} = {other!r}"


@pytest.mark.parametrize("name", CALLS)
def test_defaults_of_torch_change_nothing(torch_backend, name):
    """The first call in a context builds objects that must be right inside and outside of the context."""
    arguments = CALLS[name].arguments
    before = outcomes(name, arguments())
    for context, entered in CONTEXTS.items():
        given = [arguments() for _ in range(3)]
        with entered():
            found = [outcomes(name, call) for call in given[:2]]
        assert all(same(y, before) for y in (*found, outcomes(name, given[2]))), context


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_defaults_of_torch_change_no_launch(name, monkeypatch):
    """A launch that is prepared in a context serves later calls; each call has one of the contexts."""
    forget(monkeypatch)
    function, arguments, _ = PUBLIC[name]
    given = [arguments() for _ in range(3)]
    with [*CONTEXTS.values()][list(PUBLIC).index(name) % len(CONTEXTS)]():
        found = visible(function(**given[0]))
    later = visible(function(**given[1]))
    forget(monkeypatch)
    assert same(found, later) and same(later, visible(function(**given[2])))


FEW = {"cos": torch.ones(4, 2), "sin": torch.ones(4, 2)}
MISNAMED = {
    "an odd head": (ropelab.rope_and_quantize, {"x": torch.ones(4, 2, 13), "block_dim": 4} | FEW, "x"),
    "an odd head of the indexer": (
        ropelab.rope_and_quantize_indexer, {"q": torch.ones(4, 2, 13), "weights": torch.ones(4, 2)} | FEW, "q",
    ),
    "a head of 12 of the indexer": (
        ropelab.rope_and_quantize_indexer, {"q": torch.ones(4, 2, 12), "weights": torch.ones(4, 2)} | FEW, "q",
    ),
    "an odd key": (
        ropelab.assemble_mla,
        {"q": torch.ones(1, 4, 2, 11), "kv": torch.ones(1, 4, 2, 12), "k_pe": torch.ones(1, 4, 1, 3)} | FEW, "k_pe",
    ),
    "kv of another dtype": (
        ropelab.rope_and_block_scaled_cache,
        {"q": torch.ones(4, 2, 12).bfloat16(), "kv": torch.ones(4, 12).half(), "slot_mapping": torch.arange(4),
         "kv_cache": torch.zeros(2, 112, dtype=torch.uint8), "block_size": 4, "block_dim": 8} | FEW, "kv",
    ),
    "a base of 1 for YaRN": (
        ropelab.rope_from_config,
        {"config": CONFIG | {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}}, "rope_theta",
    ),
}  # fmt: skip
"""Calls whose wrong argument another one may be blamed for: two arguments are wrong together, or an inner function asks
for what the outer one has under another name."""


@pytest.mark.parametrize(("function", "call", "argument"), MISNAMED.values(), ids=MISNAMED)
def test_the_message_names_the_argument_of_the_function_that_was_called(function, call, argument):
    assert outcome(function, call, argument=argument) == "refused"


def test_every_parameter_of_every_public_function_is_replaced():
    given = {}
    for name, call in PUBLIC.items():
        some = {argument for argument, value in call.arguments().items() if value is not None}
        given[name.partition(", ")[0]] = given.get(name.partition(", ")[0], set()) | some
    assert given == functions()


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.partition(", ")[0] in OPERATIONS])
def test_tensors_without_memory_of_their_own_are_right_or_refused(name):
    """Also where others have prepared the call. The first call of each function runs the kernels."""
    wrong, (function, arguments, _) = [], PUBLIC[name]
    with ropelab.use_backend("triton") if HAS_TRITON and ", " not in name else ropelab.use_backend("torch"):
        for _ in range(2):
            for argument in tensors(arguments()):
                if "[" not in argument:
                    call = arguments()
                    found = outcome(function, call | {argument: WithoutMemory(call[argument])})
                    wrong += [] if found in ("right", "refused") else [f"{argument}: {found}"]
            assert outcome(function, arguments()) == "right"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name, x in PUBLIC.items() if {"cos", "sin"} <= x.arguments().keys()])
def test_tables_that_are_too_short_are_refused_without_data(torch_backend, name):
    """Where a call has positions, their contents decide, and on meta there are none."""
    function, arguments, _ = PUBLIC[name]
    call = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in arguments().items()}
    function(**call)
    reads = {"positions", "deltas"} & call.keys() or isinstance(call.get("offsets"), torch.Tensor)
    if call["cos"] is not None and not reads:
        with pytest.raises(ValueError, match="^cos: expected a row for each of 4 positions"):
            function(**call | {name: call[name][:3] for name in ("cos", "sin")})


@pytest.mark.parametrize("name", ADAPTERS)
def test_memory_of_an_output_is_refused_or_does_not_matter(torch_backend, name):
    """The operators are in test_table_memory.py."""
    wrong, function = [], CALLS[name].function
    for output, other, call in aliased(CALLS[name]):
        apart = copied(call)
        function(**apart)
        found = outcome(function, call)
        if found == "right" and output in changed(contents(apart), call):
            found = "another result"
        if found not in ("right", "refused"):
            wrong.append(f"{other} in {output}: {found}")
    assert not wrong, "\n".join(wrong)
