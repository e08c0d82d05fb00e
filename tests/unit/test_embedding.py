"""RotaryEmbedding has the right tables whatever happens to the module, its dtype, its device and its copies."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch

import ropelab
from ropelab import RotaryEmbedding, embedding, rope_from_config
from tests.support import assert_rotated, draw

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4, "max_position_embeddings": 4096}
DYNAMIC = HEADS | {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
LONGROPE = HEADS | {
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0 + i for i in range(8)]},
}


def expected(rope, *xs, seq_len=None, **options):
    seq_len = seq_len or xs[0].shape[1]
    cos, sin = rope.at_length(seq_len).tables(seq_len, device=xs[0].device)
    return ropelab.apply_rope(*xs, cos=cos, sin=sin, layout=rope.layout, out_layout=rope.out_layout, **options)


def assert_same(actual, wanted):
    for y, y_wanted in zip(actual, wanted, strict=True):
        assert torch.equal(y, y_wanted)


on_cpu = pytest.mark.parametrize("device", ["torch"], indirect=True)
"""One path is enough for tests of the tables, because they do not depend on the kernel."""


@pytest.fixture
def qk(device):
    return draw(2, 9, 4, 16, device=device), draw(2, 9, 1, 16, device=device)


@pytest.mark.parametrize("config", [
    HEADS, HEADS | {"rotary_dim": 8, "model_type": "gptj"}, HEADS | {"rope_interleave": True},
    HEADS | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
], ids=["default", "partial, adjacent", "adjacent to halves", "attention factor"])  # fmt: skip
def test_rotates_as_the_configuration_says(qk, config):
    rotary, rope = RotaryEmbedding.from_config(config), rope_from_config(config)
    cos, sin = rope.tables(9, device=qk[0].device)
    layouts = {"layout": rope.layout, "out_layout": rope.out_layout}
    for x, y in zip(qk, rotary(*qk), strict=True):
        assert_rotated(y, x, cos, sin, **layouts)
    assert torch.equal(rotary(qk[0]), rotary(*qk)[0])
    back = RotaryEmbedding(ropelab.Rope(rope.inverse_frequencies))(*rotary(*qk), inverse=True)
    if config is HEADS:
        torch.testing.assert_close(back, qk)


@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
def test_a_number_of_features_and_a_base_are_enough(qk, layout):
    rotary = RotaryEmbedding(16, base=500.0, layout=layout)
    cos, sin = ropelab.rotary_table(9, 16, 500.0, device=qk[0].device)
    for x, y in zip(qk, rotary(*qk), strict=True):
        assert_rotated(y, x, cos, sin, layout=layout)
    defaults = RotaryEmbedding.from_config(HEADS).rope
    assert torch.equal(RotaryEmbedding(16).rope.inverse_frequencies, defaults.inverse_frequencies)


def test_where_the_tokens_are(qk):
    rotary, rope, (q, k) = RotaryEmbedding.from_config(HEADS), rope_from_config(HEADS), qk
    host = {
        "offsets": [0, 7, 900, -3, -40], "positions": [torch.randint(-700, 700, (2, 9)), torch.arange(9) + 5000],
    }  # fmt: skip
    for name, values in host.items():
        for value in values:
            value = value.to(q.device) if isinstance(value, torch.Tensor) else value
            wanted = expected(rope, q, k, seq_len=6000, **{name: value})
            assert_same(rotary(q, k, **{name: value}, seq_len=6000 if q.is_cuda else None), wanted)
    starts = torch.tensor([3, 507], device=q.device)  # the tables end within the second sequence
    wanted = expected(rope, q, k, seq_len=516, offsets=starts)
    assert_same(RotaryEmbedding(rope)(q, k, offsets=starts, seq_len=516 if q.is_cuda else None), wanted)
    assert q.is_cuda or rotary._needed_length(q, None, starts) == 516
    overwritten = q.clone()
    assert rotary(overwritten, inplace=True) is overwritten and torch.equal(overwritten, rotary(q))
    nowhere = torch.full((9,), ropelab.NO_POSITION, device=q.device)
    assert not rotary(q, positions=nowhere, seq_len=1).any()


@on_cpu
def test_formats(qk):
    rope, (q, k) = rope_from_config(HEADS), qk
    wanted = expected(rope, q, k)
    for seq_format, axes in (("sbhd", (0, 1)), ("bhsd", (1, 2))):
        rotary = RotaryEmbedding(rope, seq_format=seq_format)
        assert_same([y.transpose(*axes) for y in rotary(q.transpose(*axes), k.transpose(*axes))], wanted)
    rotary = RotaryEmbedding(rope, seq_format="thd")
    assert_same(rotary(q[0], k[0]), [y[0] for y in wanted])


@pytest.mark.parametrize("seq_format", ["bshd", "thd"])
def test_positions_along_several_axes(qk, seq_format):
    config = HEADS | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    rotary, rope, (q, k) = RotaryEmbedding.from_config(config, seq_format=seq_format), rope_from_config(config), qk
    positions = torch.randint(0, 700, (3, 2, 9), device=q.device)
    if seq_format == "thd":
        q, k, positions = q[0], k[0], positions[:, 0]
    cos, sin = rope.tables(700, positions, device=q.device)
    wanted = ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format=seq_format)
    assert_same(rotary(q, k, positions=positions, seq_len=700), wanted)
    text = positions[0]
    assert_same(
        rotary(q, k, positions=text, seq_len=700), rotary(q, k, positions=text.expand(3, *text.shape), seq_len=700)
    )


@on_cpu
def test_modules_with_the_same_frequencies_read_their_own_axes(qk):
    q, _ = qk
    positions = torch.randint(0, 700, (3, 2, 9))
    configs = [
        HEADS | {"rope_scaling": {"type": "mrope", "mrope_section": section}} for section in ([2, 3, 3], [3, 3, 2])
    ]
    modules = [RotaryEmbedding.from_config(config) for config in configs]  # alive, so tables that serve both are shared
    for module, config in zip(modules, configs, strict=True):
        cos, sin = rope_from_config(config).tables(700, positions)
        assert torch.equal(module(q, positions=positions, seq_len=700), ropelab.apply_rope(q, cos=cos, sin=sin))


@pytest.mark.parametrize("change", [
    lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(),
    lambda m: m.to("meta").to_empty(device="cpu"),
    copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.requires_grad_(False).eval(),
], ids=["half", "bfloat16", "double", "to_empty", "deepcopy", "pickle", "eval"])  # fmt: skip
@pytest.mark.parametrize("config", [HEADS, LONGROPE], ids=["default", "LongRoPE"])
@on_cpu
def test_survives(qk, change, config):
    """In a model, in every dtype of the inputs, tables stay float32 and bits right, before and after the first call."""
    rope = rope_from_config(config)
    for called in (False, True):
        model = torch.nn.ModuleDict({"rotary": RotaryEmbedding.from_config(config), "linear": torch.nn.Linear(2, 2)})
        if called:
            model["rotary"](*qk)
        model = change(model)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            xs = [x.to(dtype) for x in qk]
            assert_same(model["rotary"](*xs), expected(rope, *xs))
            assert_same(model["rotary"](*xs, offsets=100), expected(rope, *xs, seq_len=109, offsets=100))
        tables = model["rotary"].tables(9)
        assert all(t.dtype == torch.float32 for t in tables)


@on_cpu
def test_born_on_meta(qk):
    with torch.device("meta"):
        rotary = RotaryEmbedding.from_config(HEADS)
    rotary.to_empty(device=qk[0].device)
    assert_same(rotary(*qk), expected(rope_from_config(HEADS), *qk))
    assert rotary(qk[0].to("meta")).is_meta
    assert_same(rotary(*qk), expected(rope_from_config(HEADS), *qk))


@on_cpu
def test_is_no_part_of_a_checkpoint(qk):
    old, new = RotaryEmbedding.from_config(HEADS), RotaryEmbedding.from_config(HEADS)
    old(*qk)
    state = old.state_dict()
    assert not state and not list(old.buffers()) and not list(old.parameters())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    new.load_state_dict(torch.load(file), strict=True, assign=True)
    assert_same(new(*qk), expected(rope_from_config(HEADS), *qk))


@on_cpu
def test_autocast(qk):
    rotary = RotaryEmbedding.from_config(HEADS)
    with torch.autocast(qk[0].device.type, torch.bfloat16):
        assert_same(rotary(*qk), expected(rope_from_config(HEADS), *qk))
    assert rotary.tables(9)[0].dtype == torch.float32


@pytest.mark.parametrize("config", [DYNAMIC, LONGROPE], ids=["dynamic NTK", "LongRoPE"])
def test_a_long_prompt_leaves_no_trace(device, config):
    rotary, rope = RotaryEmbedding.from_config(config), rope_from_config(config)
    for seq_len in (5, 32, 33, 60, 40, 60, 5, 33, 32):
        q = draw(1, seq_len, 2, 16, device=device)
        assert torch.equal(rotary(q), expected(rope, q)), seq_len
        one = draw(1, 1, 2, 16, device=device)  # the next token
        wanted = expected(rope, one, seq_len=seq_len + 1, offsets=seq_len)
        assert torch.equal(rotary(one, offsets=seq_len), wanted)
    short, long = (rotary._prepared(seq_len, q.device) for seq_len in (5, 60))
    for _ in range(2):  # both are kept, so that they may mix
        assert rotary._prepared(5, q.device) is short and rotary._prepared(60, q.device) is long


def test_nobody_can_change_the_tables_of_a_module(qk):
    """Whoever writes to the results of `tables` changes no rotation, of this module or of others."""
    first, second = (RotaryEmbedding.from_config(HEADS) for _ in range(2))
    before = first(*qk)
    for table in first.tables(9, qk[0].device):
        table.fill_(math.nan)
    for module in (first, second, RotaryEmbedding.from_config(HEADS)):
        assert all(torch.equal(y, b) for y, b in zip(module(*qk), before, strict=True))
        assert not any(table.isnan().any() for table in module.tables(9, qk[0].device))


def test_short_prompts_are_as_transformers_has_them():
    """The model's own module shrinks back as well, and agrees to float32's rounding."""
    code = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(**HEADS | {"max_position_embeddings": 32, "rope_scaling": DYNAMIC["rope_scaling"]})
    theirs, ours = code.LlamaRotaryEmbedding(config), RotaryEmbedding.from_config(config)
    for seq_len in (20, 60, 20):
        cos, _ = theirs(torch.zeros(1), torch.arange(seq_len)[None])
        bound = seq_len * 32 * torch.finfo(torch.float32).eps  # positions times a few roundings of the frequencies
        torch.testing.assert_close(ours.tables(seq_len)[0][:seq_len], cos[0, :, :8], rtol=0, atol=bound)


def test_tables_grow_by_need_and_are_shared(device):
    first, second = (RotaryEmbedding.from_config(HEADS) for _ in range(2))
    other = RotaryEmbedding.from_config(HEADS | {"rope_theta": 2e4})
    q = draw(1, 3, 2, 16, device=device)
    first(q)
    tables = first._prepared(1, q.device)
    assert len(tables.cos) == embedding.FEWEST_ROWS
    assert second._prepared(1, q.device) is tables and other._prepared(1, q.device) is not tables
    first(q, offsets=embedding.FEWEST_ROWS - 3)
    assert first._prepared(1, q.device) is tables
    first(q, offsets=embedding.FEWEST_ROWS - 2)
    grown = first._prepared(1, q.device)
    assert len(grown.cos) == 2 * embedding.FEWEST_ROWS
    assert torch.equal(grown.cos[: embedding.FEWEST_ROWS], tables.cos)
    assert second._prepared(1000, q.device) is grown
    count = len(embedding._shared)
    del first, second, other, tables, grown
    assert len(embedding._shared) < count


@on_cpu
def test_copies_share_tables(qk):
    rotary = RotaryEmbedding.from_config(HEADS)
    rotary(*qk)
    again = copy.deepcopy(rotary)
    assert again._prepared(9, qk[0].device) is rotary._prepared(9, qk[0].device) and len(pickle.dumps(rotary)) < 4000


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@on_cpu
def test_tables_made_without_gradients_serve_training(qk, mode):
    rotary, (q, k) = RotaryEmbedding.from_config(HEADS), qk
    with mode():
        rotary(q, k)
    q = q.requires_grad_()
    rotary(q, k)[0].square().sum().backward()
    torch.testing.assert_close(q.grad, 2 * q)  # a rotation keeps lengths


def test_tables_made_under_a_transform_serve_others(qk):
    rotary, q = RotaryEmbedding.from_config(HEADS | {"rope_theta": 3e4}), qk[0]
    gradient = torch.func.grad(lambda x: rotary(x).square().sum())(q)
    torch.testing.assert_close(gradient, 2 * q)
    assert torch.equal(rotary(q), expected(rotary.rope, q))


@on_cpu
def test_tables_made_of_nothing_are_not_kept(qk):
    rotary, q = RotaryEmbedding.from_config(HEADS | {"rope_theta": 4e4}), qk[0]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert rotary(torch.empty(q.shape, device=q.device)).shape == q.shape
    assert torch.equal(rotary(q), expected(rotary.rope, q))


@pytest.fixture
def compiled():
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes a second to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    yield counter
    torch._dynamo.reset()


def test_compiles_once_when_prepared(device, compiled):
    rotary, rope = RotaryEmbedding.from_config(HEADS | {"rope_theta": 5e4}), None
    rope = rotary.rope
    rotary.prepare(2000, "cuda" if device == "cuda" else "cpu")
    fast = torch.compile(rotary, fullgraph=True, dynamic=True, backend=compiled)
    for seq_len, offset in ((5, 2), (9, 700), (3, 20), (12, 1988)):
        q = draw(2, seq_len, 2, 16, device=device)
        assert torch.equal(fast(q, offsets=offset), expected(rope, q, seq_len=2000, offsets=offset))
    assert compiled.frame_count == 1


def test_compiled_without_preparation_grows(device, compiled):
    rotary = RotaryEmbedding.from_config(HEADS | {"rope_theta": 6e4})
    fast = torch.compile(rotary, dynamic=True, backend=compiled)
    for seq_len, offset in ((5, 2), (9, 700), (9, 3), (5, 3000)):
        q = draw(1, seq_len, 2, 16, device=device)
        assert torch.equal(fast(q, offsets=offset), expected(rotary.rope, q, seq_len=4000, offsets=offset))


def test_positions_on_a_gpu_are_not_waited_for():
    """Meta tensors stand in for the GPU: nobody can read them."""
    q, positions = torch.empty(1, 5, 2, 16, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    assert RotaryEmbedding.from_config(HEADS)._needed_length(q, positions, 0) == HEADS["max_position_embeddings"]
    for config in (DYNAMIC, HEADS | {"max_position_embeddings": None}):
        for where in ({"positions": positions}, {"offsets": positions[:1]}):
            with pytest.raises(ValueError, match="seq_len: expected the length of the longest sequence, because"):
                RotaryEmbedding.from_config(config)(q, **where)


def test_no_position_at_all(device):
    """NO_POSITION gives zeros without tables for 2^31 positions; offsets may be numbers of NumPy."""
    rotary, q = RotaryEmbedding.from_config(HEADS), draw(1, 5, 2, 16, device=device)
    assert not rotary(q, offsets=ropelab.NO_POSITION).any()
    assert rotary.tables(1, q.device)[0].shape[0] == 512
    assert torch.equal(rotary(q, offsets=np.int64(7)), rotary(q, offsets=7))
    for far in (2**31 - 4, -(2**31) + 1 - 2**31):
        with pytest.raises(ValueError, match="offsets: expected"):
            rotary(q, offsets=far)
    with pytest.raises(ValueError, match="positions: expected"):
        rotary(q, positions=torch.full((5,), -(2**63)))


def test_one_position_does_not_fill_the_memory(monkeypatch):
    """Beyond a limit, and beyond the lengths of the model, only the caller can ask for tables."""
    monkeypatch.setattr(embedding, "MOST_UNSAID", 600)
    q, far = draw(1, 3, 2, 16), torch.tensor([0, -700, 1])
    short, long = (RotaryEmbedding(rope_from_config(HEADS | {"max_position_embeddings": n})) for n in (64, 1024))
    for name, value in (("positions", far), ("offsets", 700), ("offsets", torch.tensor([-700]))):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            short(q, **{name: value})
        assert short(q, **{name: value}, seq_len=703).isfinite().all()
        assert long(q, **{name: value}).isfinite().all()


def test_positions_have_the_axes_of_the_rotation():
    rotary, q = RotaryEmbedding(ropelab.axial_rope((4, 6, 6))), draw(1, 5, 2, 16)
    assert rotary(q, positions=torch.zeros(3, 1, 5, dtype=torch.int64)).equal(q)
    with pytest.raises(ValueError, match=r"positions: expected shape \(3, 5\) or .*, got \(2, 1, 5\)"):
        rotary(q, positions=torch.zeros(2, 1, 5, dtype=torch.int64))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    rotary, q = RotaryEmbedding.from_config(HEADS), draw(1, 4, 2, 16, device="cuda")
    positions = torch.arange(4, device="cuda")
    rotary.prepare(2048, "cuda")
    rotary(q, positions=positions, seq_len=2048)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rotary(q, positions=positions, seq_len=2048)
    positions += 1000
    graph.replay()
    assert torch.equal(y, expected(rotary.rope, q, seq_len=2048, positions=positions))
    with pytest.raises(RuntimeError, match=r"seq_len: expected prepare\(5000\) before the capture of a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            rotary(q, positions=positions, seq_len=5000)
