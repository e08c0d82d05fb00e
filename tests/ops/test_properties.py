"""Every valid call agrees with the definition, for random arguments of every public function.

Hypothesis draws the arguments, always the same ones, and shrinks what fails to a small example. Calls take the path in
torch operations: that the kernels have its bits is tested elsewhere, and their interpreter is slow.
"""

import json
import math
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.interop.flashinfer import slot_mapping
from ropelab.layout.pairing import LAYOUTS, permutation
from tests.ops.test_qk_norm import Case
from tests.support import assert_rotated
from tests.unit.test_positions import shares

pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.ops.strategies import DTYPES, POSITION_DTYPES, rotations, tensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_operations")

examples = settings(max_examples=150)


# ------------------------------------------------------------------------------------------------ the rotation


def agrees(case, ys) -> None:
    """Every result is the rotation up to the roundings that cannot be avoided."""
    ys = (ys,) if case.k is None else ys
    for x, y in zip(case.tensors, ys, strict=True):
        assert_rotated(y, x, **({"layout": "split_half"} | case.options))


@examples
@given(rotations())
def test_apply_rope_is_the_definition(case):
    before = [x.clone() for x in case.tensors]
    agrees(case, ropelab.apply_rope(case.q, case.k, **case.options))
    assert all(torch.equal(x, copy) for x, copy in zip(case.tensors, before, strict=True))


@examples
@given(rotations(inplace=True))
def test_in_place_has_the_same_bits_and_touches_nothing_else(case):
    def storages():
        return [x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0) for x in case.tensors]

    expected = ropelab.apply_rope(case.q, case.k, **case.options)
    expected = (expected,) if case.k is None else expected
    wanted = [whole.clone() for whole in storages()]
    for whole, x, y in zip(wanted, case.tensors, expected, strict=True):
        whole.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(y)
    found = ropelab.apply_rope(case.q, case.k, inplace=True, **case.options)
    found = (found,) if case.k is None else found
    assert all(y is x for x, y in zip(case.tensors, found, strict=True))
    assert all(torch.equal(whole, y) for whole, y in zip(storages(), wanted, strict=True))


@examples
@given(rotations())
def test_the_gradients_of_tables_are_rounded_once(case):
    """The arithmetic is as wide as the input, whose numbers may be beyond the range of the tables."""
    size = 2.0**600 if case.q.dtype == torch.float64 else 1.0
    xs = [x * size for x in case.tensors]
    tables = [case.options.pop(name).detach().requires_grad_() for name in ("cos", "sin")]
    ys = ropelab.apply_rope(*xs, cos=tables[0], sin=tables[1], **case.options)
    ys = (ys,) if case.k is None else ys
    gs = [torch.randn_like(y) / size for y in ys]
    found = torch.autograd.grad(ys, tables, gs)

    wanted = [t.detach().double().requires_grad_() for t in tables]
    options = {"layout": "split_half"} | case.options
    ys = [reference.rotate(x, *wanted, **options) for x in xs]
    expected = torch.autograd.grad(ys, wanted, [g.double() for g in gs])
    products = 2 * sum(x.shape.numel() // x.shape[-1] for x in xs)  # of an entry, at most
    largest = max((x.double().abs().max() * g.abs().max() for x, g in zip(xs, gs, strict=True) if x.numel()), default=0)
    unit = torch.finfo(torch.promote_types(xs[0].dtype, torch.promote_types(tables[0].dtype, torch.float32))).eps / 2
    for table, grad, truth in zip(tables, found, expected, strict=True):
        out = torch.finfo(table.dtype)
        bound = products * (unit + 2.0**-53) * products * largest  # each sum, in any order
        bound = bound + out.eps / 2 * (truth.abs() + bound) + out.tiny * out.eps
        assert grad.dtype == table.dtype and ((grad.double() - truth).abs() <= bound).all()


@examples
@given(rotations(table_dtypes=(torch.float32,)), st.integers(-(2**31) + 2, 2**31 - 8), st.sampled_from([1e4, 5e5]))
def test_without_tables_it_is_the_rotation_by_the_angle_itself(case, start, base):
    """The positions are any int32 numbers but the two reserved ones, and the truth has angles of 200 bits."""
    columns = case.options.pop("cos").shape[-1]
    del case.options["sin"]
    if "rotary_slice" in case.options:
        columns = (case.options["rotary_slice"][1] - case.options["rotary_slice"][0]) // 2
    case.options.pop("positions", None)
    tokens = case.q.shape[ropelab.layout.seq_format.SEQ_AXIS[case.options["seq_format"]]]
    case.options["offsets"] = start
    frequencies = ropelab.rotary_frequencies(2 * columns, base)
    ys = ropelab.apply_rope(case.q, case.k, frequencies=frequencies, **case.options)
    ys = (ys,) if case.k is None else ys

    theta = ropelab.angles.frequencies.inverse_frequencies(2 * columns, base)
    angles = np.array([[exact_angle(start + token, f) for f in theta.tolist()] for token in range(tokens)])
    cos, sin = (torch.from_numpy(f(angles.reshape(tokens, columns))) for f in (np.cos, np.sin))
    where = {name: value for name, value in case.options.items() if name != "offsets"}
    for x, y in zip(case.tensors, ys, strict=True):
        if not tokens:
            assert y.shape == x.shape
            continue
        truth = reference.rotate(x, cos, sin, **where)
        # One unit of the last place of cos and of sin, then two roundings of half a unit, and storing once more.
        size = reference.rotate(x.abs(), torch.ones_like(cos), torch.zeros_like(sin), **where).abs()
        partner = reference.rotate(x.abs(), torch.zeros_like(cos), torch.ones_like(sin), **where).abs()
        unit = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        unit = max(unit, torch.finfo(torch.float32).eps)  # cos and sin are float32
        out = torch.finfo(x.dtype)
        bound = ((1 + unit) * (1 + unit / 2) ** 2 - 1) * (size + partner)
        bound = bound + out.eps / 2 * (truth.abs() + bound) + out.tiny * out.eps
        assert ((y.double() - truth).abs() <= bound).all()


TURN = Fraction(0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410, 1 << 192)  # 1 / (2 pi)


def exact_angle(position: int, frequency: float) -> float:
    """The angle in [-pi, pi], from a product that rounds nowhere."""
    turns = position * Fraction(frequency) * TURN
    return float((turns - round(turns)) / TURN)


@examples
@given(st.data())
def test_apply_qk_norm_rope_is_the_definition(data):
    """Results and all gradients are within the bound that `tests.ops.test_qk_norm` derives."""
    case = data.draw(rotations(with_k=True, dtypes=DTYPES[:1] + DTYPES[3:], table_dtypes=(torch.float32,)))
    for name in ("inverse", "out_layout"):
        case.options.pop(name, None)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from(DTYPES))
    eps = data.draw(st.sampled_from([1e-6, 1e-5, 0.5]))
    weights = [tensor((case.q.shape[-1],), dtype, "contiguous", generator) for _ in range(2)]
    tensors = tuple(x.detach().clone().requires_grad_() for x in (case.q, case.k, *weights))
    grads = tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in case.tensors)
    if case.q.numel() and case.k.numel():
        Case(tensors, grads, case.options | {"eps": eps}).check()
    else:
        ys = ropelab.apply_qk_norm_rope(*tensors, eps=eps, **case.options)
        assert [y.shape for y in ys] == [x.shape for x in case.tensors]


# ------------------------------------------------------------------------------------------------ tables


@examples
@given(st.integers(0, 40), st.integers(1, 40), st.floats(1.0, 1e8), st.sampled_from(DTYPES))
def test_rotary_table_is_cos_and_sin(seq_len, planes, base, dtype):
    """theta = base^e: the exponent rounds, the power and the product with the position do, and the cosine does."""
    cos, sin = ropelab.rotary_table(seq_len, 2 * planes, base, dtype=dtype)
    assert cos.shape == sin.shape == (seq_len, planes) and cos.dtype == sin.dtype == dtype
    exponents = -2 * np.arange(planes, dtype=np.longdouble) / (2 * planes)
    angles = np.outer(np.arange(seq_len, dtype=np.longdouble), np.longdouble(base) ** exponents)
    u, out = 2.0**-53, torch.finfo(dtype)
    for table, function in ((cos, np.cos), (sin, np.sin)):
        truth = function(angles)
        bound = angles * (math.log(base) + 4) * u + 2 * u
        bound = bound + out.eps / 2 * (np.abs(truth) + bound) + out.tiny * out.eps
        assert (np.abs(table.double().numpy() - truth) <= bound).all()


@examples
@given(st.data())
def test_axial_tables_are_rows_of_the_axis_of_each_column(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    axes, columns, rows, tokens = (data.draw(st.integers(1, most)) for most in (3, 6, 5, 4))
    batch = data.draw(st.sampled_from([(), (2,)]))
    cos, sin = (tensor((rows, columns), torch.float32, "contiguous", generator) for _ in range(2))
    row = st.sampled_from([*range(1 - rows, rows), ropelab.NO_POSITION, rows])
    count = axes * math.prod(batch) * tokens
    dtype = data.draw(st.sampled_from(POSITION_DTYPES))
    positions = torch.tensor(data.draw(st.lists(row, min_size=count, max_size=count)), dtype=dtype)
    positions = positions.reshape(axes, *batch, tokens)
    of_column = data.draw(st.lists(st.integers(0, axes - 1), min_size=columns, max_size=columns))
    given_axes = torch.tensor(of_column) if data.draw(st.booleans()) else of_column
    found = ropelab.axial_tables(cos, sin, positions, given_axes)
    for index in np.ndindex(*batch, tokens):
        for column, axis in enumerate(of_column):
            position = int(positions[(axis, *index)])
            c, s = (float(table[(*index, column)]) for table in found)
            if position == ropelab.NO_POSITION:
                assert c == s == 0
            elif abs(position) >= rows:
                assert math.isnan(c) and math.isnan(s)
            else:
                sign = -1 if position < 0 else 1
                assert (c, s) == (float(cos[abs(position), column]), sign * float(sin[abs(position), column]))


# ------------------------------------------------------------------------------------------------ positions


@examples
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(-9, 9), st.sets(st.integers(0, 2)))
def test_grid_positions_are_indices(sizes, start, centred):
    if not sizes:
        return
    centred = {axis for axis in centred if axis < len(sizes)}
    firsts = [-(size - size // 2) if axis in centred else 0 for axis, size in enumerate(sizes)]
    firsts[0] += start
    expected = [[first + i for first, i in zip(firsts, index, strict=True)] for index in np.ndindex(*sizes)]
    found = ropelab.grid_positions(*sizes, start=start, centred=centred)
    assert found.shape == (len(sizes), math.prod(sizes)) and found.dtype == torch.int64
    assert found.T.tolist() == expected


@examples
@given(st.integers(0, 6), st.integers(-(2**31) + 1, 2**31 - 8), st.integers(1, 4))
def test_text_positions_count_along_every_axis(tokens, start, axes):
    found = ropelab.text_positions(tokens, start=start, axes=axes)
    assert found.dtype == torch.int64 and found.tolist() == [list(range(start, start + tokens))] * axes


@st.composite
def ranks(draw) -> tuple[dict, int]:
    """Arguments of a rank, and the number that lengths must be multiples of."""
    size = draw(st.integers(1, 4))
    chunks = draw(st.sampled_from(["dual", "contiguous"]))
    divisor = 1 if size == 1 else 2 * size if chunks == "dual" else size
    return {"cp_size": size, "cp_rank": draw(st.integers(0, size - 1)), "chunks": chunks}, divisor


@examples
@given(ranks(), st.integers(0, 5))
def test_context_parallel_positions_are_the_ranks_share(rank, multiple):
    arguments, divisor = rank
    found = ropelab.context_parallel_positions(multiple * divisor, **arguments)
    assert found.dtype == torch.int32 and found.tolist() == shares(multiple * divisor, **arguments)


@examples
@given(st.data())
def test_packed_sequences_are_one_after_another(data):
    arguments, divisor = data.draw(ranks())
    lengths = [divisor * n for n in data.draw(st.lists(st.integers(0, 3), max_size=5))]
    dtype = data.draw(st.sampled_from(POSITION_DTYPES))
    cu_seqlens = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype)
    padding = data.draw(st.integers(0, 3))
    total = sum(lengths) // arguments["cp_size"] + padding
    start = st.integers(-(2**31) + 2, 2**31 - 1 - 24) | st.just(ropelab.NO_POSITION)
    if data.draw(st.booleans()):
        offsets = data.draw(start)
        starts = [offsets] * len(lengths)
    else:
        starts = data.draw(st.lists(start, min_size=len(lengths), max_size=len(lengths)))
        offsets = torch.tensor(starts, dtype=data.draw(st.sampled_from(POSITION_DTYPES)))
    packed = ropelab.PackedSequences(cu_seqlens, total, offsets=offsets, **arguments)
    positions, indices = [], []
    for first, length, begin in zip(starts, lengths, cu_seqlens.tolist(), strict=False):
        mine = shares(length, **arguments)
        positions += [first if first == ropelab.NO_POSITION else first + i for i in mine]
        indices += [begin + i for i in mine]
    nowhere = [ropelab.NO_POSITION] * padding
    assert packed.positions.dtype == torch.int32 and packed.positions.tolist() == positions + nowhere
    assert packed.token_indices().tolist() == indices + nowhere
    packed.check()


ANY_INDEX = st.integers(-2, 6) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63)])


@st.composite
def requests(draw) -> tuple[list, list, list, int]:
    """Pages, their ends, tokens ``(request, place)`` and the size of a page, in which at most one number is wrong."""
    size = draw(st.integers(1, 3))
    counts = draw(st.permutations([draw(st.integers(1, 2)), *draw(st.lists(st.integers(0, 2), max_size=2))]))
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    pages = draw(st.permutations(range(ends[-1] + 1)))
    full = [request for request, count in enumerate(counts) if count]
    tokens = [
        (request, draw(st.integers(0, counts[request] * size - 1)))
        for request in draw(st.lists(st.sampled_from(full), min_size=1, max_size=3))
    ]
    at = draw(st.integers(0, 3))
    request, place = draw(st.sampled_from(range(len(counts)))), draw(ANY_INDEX)
    match draw(st.sampled_from(["nothing", "nothing", "one place too far", "token", "page", "end"])):
        case "one place too far":  # into the first page of the next request
            tokens.append((request, counts[request] * size))
        case "token":
            tokens.append((draw(ANY_INDEX), place))
        case "page":
            pages[at % len(pages)] = place
        case "end":
            ends[at % len(ends)] = place
    return pages, ends, tokens, size


def test_slots_of_flashinfer_never_leave_the_pages_of_a_request():
    calls, valid = 0, 0

    @examples
    @given(requests())
    def check(drawn):
        nonlocal calls, valid
        pages, ends, tokens, size = drawn
        expected = []
        for request, place in tokens:
            first, end = ends[request : request + 2] if 0 <= request < len(ends) - 1 else (0, 0)
            page, inside = divmod(place, size)
            has_page = 0 <= first <= end <= len(pages) and 0 <= page < end - first and 0 <= pages[first + page] < 2**31
            expected.append(pages[first + page] * size + inside if has_page else -1)
        indices = [torch.tensor(x, dtype=torch.int64) for x in (pages, ends, *zip(*tokens, strict=True))]
        with mock.patch("torch.compiler.is_compiling", lambda: True):  # as on a GPU, the host reads nothing
            assert slot_mapping(*indices, size).tolist() == expected
        calls, valid = calls + 1, valid + (max(expected) >= 0)
        if all(slot >= 0 for (request, _), slot in zip(tokens, expected, strict=True) if request >= 0):
            assert slot_mapping(*indices, size).tolist() == expected
        else:
            with pytest.raises(ValueError, match="expected"):
                slot_mapping(*indices, size)

    check()
    assert valid >= calls / 3  # a test of refusals alone would see no write into another request's page


# ------------------------------------------------------------------------------------------------ layouts, modules


@examples
@given(st.data())
def test_converted_weights_rotate_in_the_other_layout(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    width = 2 * data.draw(st.integers(1, head_dim // 2))
    first = data.draw(st.integers(0, head_dim - width))
    source, target = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(LAYOUTS))
    x = tensor(
        (heads * head_dim, *data.draw(st.sampled_from([(), (3,), (2, 2)]))), torch.float64, "contiguous", generator
    )
    options = {"rotary_slice": (first, first + width)}
    converted = ropelab.convert_layout(x, head_dim, source, target, **options)
    assert torch.equal(ropelab.convert_layout(converted, head_dim, target, source, **options), x)

    cos, sin = (tensor((1, width // 2), torch.float64, "contiguous", generator) for _ in range(2))
    order = torch.arange(head_dim)
    order[first : first + width] = first + permutation(width, source, target)

    def rotated(y: torch.Tensor, layout: str) -> torch.Tensor:
        vectors = y.reshape(heads, head_dim, -1).movedim(1, -1)[None]  # [1, S, H, D]
        return reference.rotate(vectors, cos.expand(heads, -1), sin.expand(heads, -1), layout=layout, **options)

    assert torch.equal(rotated(converted, target), rotated(x, source)[..., order])


@st.composite
def configurations(draw) -> tuple[dict, dict]:
    """The entries of a configuration beside the rotation, and the parameters of the rotation as of version 5."""
    planes = 2 * draw(st.integers(1, 8))
    fraction = draw(st.sampled_from([None, 1.0, 0.5]))
    head_dim = 2 * planes if fraction != 0.5 else 4 * planes
    settings_ = {"model_type": draw(st.sampled_from(["llama", "gptj", "deepseek_v3", None]))}
    if draw(st.booleans()):
        settings_["head_dim"] = head_dim
    else:
        settings_ |= {"hidden_size": 3 * head_dim, "num_attention_heads": 3}
    settings_["max_position_embeddings"] = draw(st.integers(8, 64))
    factor = draw(st.floats(1.0, 32.0))
    trained = {"original_max_position_embeddings": draw(st.integers(4, 32))}
    each = st.lists(st.floats(0.5, 64.0), min_size=planes, max_size=planes)
    parameters = draw(st.sampled_from([
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": factor},
        {"rope_type": "ntk", "factor": factor},
        {"rope_type": "dynamic", "factor": factor},
        {"rope_type": "yarn", "factor": factor} | trained,
        {"rope_type": "longrope", "short_factor": draw(each), "long_factor": draw(each), "factor": factor} | trained,
        {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | trained,
    ]))  # fmt: skip
    parameters = parameters | {"rope_theta": draw(st.floats(10.0, 1e7))}
    if fraction is not None:
        parameters["partial_rotary_factor"] = fraction
    return settings_, parameters


def same(a: ropelab.Rope, b: ropelab.Rope) -> bool:
    names = ("attention_factor", "head_dim", "layout", "out_layout", "axes", "max_seq_len", "lengths")
    return torch.equal(a.inverse_frequencies, b.inverse_frequencies) and all(
        getattr(a, name) == getattr(b, name) for name in names
    )


@examples
@given(configurations(), st.integers(0, 100))
def test_a_configuration_means_the_same_in_every_form(configuration, seq_len):
    settings_, parameters = configuration
    config = settings_ | {"rope_parameters": parameters}
    rope = ropelab.rope_from_config(config, seq_len=seq_len)
    beside = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in beside}
    for form in (
        json.loads(json.dumps(config)),
        SimpleNamespace(**config),
        SimpleNamespace(to_dict=lambda: config),
        settings_ | beside | {"rope_scaling": scaling},
    ):
        assert same(ropelab.rope_from_config(form, seq_len=seq_len), rope)
    assert same(ropelab.rope_from_config(config).at_length(seq_len), rope)
    theta = rope.inverse_frequencies
    assert theta.dtype == torch.float64 and theta.isfinite().all() and (theta > 0).all()


@examples
@given(configurations(), st.data())
def test_the_module_is_the_definition(configuration, data):
    settings_, parameters = configuration
    config = settings_ | {"rope_parameters": parameters}
    rotary = ropelab.RotaryEmbedding.from_config(config)
    batch, tokens, offset = (data.draw(st.integers(least, 3)) for least in (1, 1, -3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k = (torch.randn(batch, tokens, heads, rotary.rope.head_dim, generator=generator) for heads in (2, 1))
    ys = rotary(q, k, offsets=offset)
    seq_len = max(offset + tokens, 1 - offset)
    rope = rotary.rope.at_length(seq_len)
    cos, sin = rope.tables(seq_len)
    for x, y in zip((q, k), ys, strict=True):
        assert_rotated(y, x, cos, sin, layout=rope.layout, out_layout=rope.out_layout, offsets=offset)
    assert all(torch.equal(y, z) for y, z in zip(ys, rotary(q, k, offsets=torch.tensor([offset] * batch)), strict=True))
