"""Several axes: sections and grids against the models' own code, and against the definition written out."""

import importlib
import itertools
import math

import pytest
import torch

import ropelab
from ropelab import axial_rope, grid_positions, rope_from_config, text_positions
from ropelab.bench import packages
from ropelab.positions import axes
from tests.support import assert_rotated_like, draw

HEADS = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}

# model -> (prefix of its classes, what its config.json says of the rotation)
MROPE = {
    "qwen2_vl": ("Qwen2VL", {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
    "qwen3_vl": (
        "Qwen3VLText",
        {"head_dim": 128, "rope_theta": 5e6, "rope_scaling": {
            "rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
    ),
    "glm4v": (
        "Glm4vText",
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": {
            "rope_type": "default", "mrope_section": [8, 12, 12]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "case"), MROPE.items(), ids=MROPE.keys())
def test_mrope_is_the_models(model, case):
    pytest.importorskip("transformers")
    prefix, published = case
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    config = getattr(configuration, f"{prefix.removesuffix('Text')}TextConfig")(**HEADS | published)
    rotary = getattr(code, f"{prefix}RotaryEmbedding")(config)

    positions = torch.randint(0, 300, (3, 2, 40))
    q, k = (draw(2, 40, heads, 128, seq_format="bhsd") for heads in (2, 1))
    expected = code.apply_rotary_pos_emb(q, k, *rotary(q, positions))
    for settings in (config, HEADS | published | {"model_type": config.model_type}):
        rope = rope_from_config(settings)
        cos, sin = rope.tables(300, positions)
        actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format="bhsd", layout=rope.layout)
        angles = positions[list(rope.axes)].movedim(0, -1)[:, None] * rope.inverse_frequencies
        for y, y_model, x in zip(actual, expected, (q, k), strict=True):
            assert_rotated_like(y, y_model, x, rope, angles, rotary.inv_freq)


def test_vision_with_half_split_chunks():
    """Gemma 4's images have rows in the first half of a head, columns in the second, and split halves within each."""
    pytest.importorskip("transformers")
    code = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    configuration = importlib.import_module("transformers.models.gemma4.configuration_gemma4")
    rotary = code.Gemma4VisionRotaryEmbedding(configuration.Gemma4VisionConfig(head_dim=64))
    positions = grid_positions(3, 4)
    q = draw(1, 12, 2, 64)
    expected = code.apply_multidimensional_rope(q, *rotary(q, positions.T[None]), positions.T[None])

    cos, sin = ropelab.rotary_table(4, 32, base=100.0)
    actual = ropelab.apply_rope(q, cos=cos, sin=sin, positions=positions[0], rotary_slice=(0, 32))
    actual = ropelab.apply_rope(actual, cos=cos, sin=sin, positions=positions[1], rotary_slice=(32, 64))
    rope = ropelab.Rope(ropelab.angles.frequencies.inverse_frequencies(32, 100.0))
    for axis, half in enumerate((slice(0, 32), slice(32, 64))):
        angles = (positions[axis, :, None] * rope.inverse_frequencies)[:, None]
        assert_rotated_like(actual[..., half], expected[..., half], q[..., half], rope, angles, rotary.inv_freq)


def test_vision_with_halves_of_the_head():
    """Qwen2-VL's images have both axes within each half."""
    pytest.importorskip("transformers")
    code = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    configuration = importlib.import_module("transformers.models.qwen2_vl.configuration_qwen2_vl")
    rotary = code.Qwen2VLVisionRotaryEmbedding(configuration.Qwen2VLVisionConfig(embed_dim=128, num_heads=2))
    positions = grid_positions(3, 4)
    q, k = draw(1, 12, 2, 64)[0], draw(1, 12, 2, 64)[0]
    expected = code.apply_rotary_pos_emb_vision(q, k, *rotary(q, positions.T))

    rope = axial_rope((32, 32), layout="split_half")
    cos, sin = rope.tables(4, positions)
    actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format="thd")
    angles = (positions[list(rope.axes)].T * rope.inverse_frequencies)[:, None]
    for y, y_model, x in zip(actual, expected, (q, k), strict=True):
        assert_rotated_like(y, y_model, x, rope, angles, rotary.inv_freq.repeat(2))


# Images and video of diffusers

SIZES = (3, 5, 4)


@pytest.fixture(scope="module")
def diffusers():
    """module name -> diffusers' code."""
    try:
        version, _ = packages.locate("diffusers")
        names = ("flux", "wan", "hunyuan_video", "qwenimage")
        submodules = [f".models.transformers.transformer_{name}" for name in names]
        with packages.imported("diffusers", version, "diffusers", ".models.embeddings", *submodules) as root:
            return root.models
    except ImportError as error:
        pytest.skip(f"diffusers: {error}")


def of_tokens(rope, positions):
    return (positions[list(rope.axes)].T * rope.inverse_frequencies)[None, None]


def rotated(rope, positions, q):
    cos, sin = rope.tables(64, positions)
    return ropelab.apply_rope(q, cos=cos, sin=sin, seq_format="bhsd", layout=rope.layout), cos, sin


def test_flux(diffusers):
    """The tables agree bit for bit, because diffusers makes them in float64, too."""
    rope = axial_rope((16, 56, 56))
    positions = torch.cat((torch.zeros(3, 7).long(), grid_positions(1, 5, 4)), dim=1)
    waves = diffusers.transformers.transformer_flux.FluxPosEmbed(10000, [16, 56, 56])(positions.T)
    q = draw(1, 27, 2, 128, seq_format="bhsd")
    y, cos, sin = rotated(rope, positions, q)
    assert torch.equal(cos.repeat_interleave(2, -1), waves[0]) and torch.equal(sin.repeat_interleave(2, -1), waves[1])
    assert_rotated_like(y, diffusers.embeddings.apply_rotary_emb(q, waves), q, rope, of_tokens(rope, positions))


def test_wan(diffusers):
    rope, positions = axial_rope((44, 42, 42)), grid_positions(*SIZES)
    embed = diffusers.transformers.transformer_wan.WanRotaryPosEmbed(128, (1, 2, 2), 64)
    waves = [wave.squeeze(2)[0] for wave in embed(torch.empty(1, 16, 3, 10, 8))]
    q = draw(1, 60, 2, 128, seq_format="bhsd")
    y, cos, sin = rotated(rope, positions, q)
    assert torch.equal(cos.repeat_interleave(2, -1), waves[0]) and torch.equal(sin.repeat_interleave(2, -1), waves[1])
    assert_rotated_like(y, diffusers.embeddings.apply_rotary_emb(q, waves), q, rope, of_tokens(rope, positions))


def float32_frequencies(dims, base):
    return torch.cat([1 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim) for dim in dims])


def test_hunyuan_video(diffusers):
    rope, positions = axial_rope((16, 56, 56), base=256.0), grid_positions(*SIZES)
    embed = diffusers.transformers.transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56], 256.0)
    waves = embed(torch.empty(1, 16, 3, 10, 8))
    q = draw(1, 60, 2, 128, seq_format="bhsd")
    expected = diffusers.embeddings.apply_rotary_emb(q, waves)
    theirs = float32_frequencies((16, 56, 56), 256.0)
    assert_rotated_like(rotated(rope, positions, q)[0], expected, q, rope, of_tokens(rope, positions), theirs)


@pytest.mark.parametrize("sizes", [(1, 5, 4), (2, 4, 7), (1, 1, 1)])
def test_qwen_image(diffusers, sizes):
    """Rows and columns count around 0, text from the larger half on; two images count as two frames."""
    code, dims = diffusers.transformers.transformer_qwenimage, (16, 56, 56)
    embed = code.QwenEmbedRope(10000, list(dims), scale_rope=True)
    image, text = embed([[sizes, sizes]], device=torch.device("cpu"), max_txt_seq_len=6)
    rope = axial_rope(dims)
    _, height, width = sizes
    grids = [grid_positions(*sizes, start=i, centred=(1, 2)) for i in range(2)]
    written = text_positions(6, start=max(height // 2, width // 2))
    for positions, waves in ((torch.cat(grids, dim=1), image), (written, text)):
        q = draw(1, positions.shape[1], 2, 128, seq_format="bhsd")
        expected = code.apply_rotary_emb_qwen(q.transpose(1, 2), waves, use_real=False).transpose(1, 2)
        actual, angles = rotated(rope, positions, q)[0], of_tokens(rope, positions)
        assert_rotated_like(actual, expected, q, rope, angles, float32_frequencies(dims, 10000.0))


# The definition, written out


@pytest.mark.parametrize(
    ("dims", "base"), [((4, 6, 6), 1e4), ((44, 42, 42), 1e4), ((16, 56, 56), 256.0), ((8, 8), 100.0)]
)
@pytest.mark.parametrize("centred", [(), (1,)])
def test_planes_turn_by_the_position_along_their_axis(dims, base, centred):
    sizes = (2, 3, 5)[: len(dims)]
    rope = axial_rope(dims, base)
    cos, sin = rope.tables(8, grid_positions(*sizes, start=1, centred=centred), dtype=torch.float64)
    firsts = [-math.ceil(size / 2) if axis in centred else 0 for axis, size in enumerate(sizes)]
    for token, place in enumerate(itertools.product(*map(range, sizes))):
        position = [first + step for first, step in zip(firsts, place, strict=True)]
        position[0] += 1
        angles = [p * base ** (-2 * i / dim) for p, dim in zip(position, dims, strict=True) for i in range(dim // 2)]
        torch.testing.assert_close(cos[token], torch.tensor(angles, dtype=torch.float64).cos(), rtol=0, atol=1e-14)
        torch.testing.assert_close(sin[token], torch.tensor(angles, dtype=torch.float64).sin(), rtol=0, atol=1e-14)


def test_sections():
    assert axes.sections([2, 0, 3]) == (0, 0, 2, 2, 2)
    assert axes.interleaved_sections([4, 2, 2]) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert axes.interleaved_sections([24, 20, 20]) == (0, 1, 2) * 20 + (0,) * 4
    assert axes.interleaved_sections([3, 3, 2]) == (0, 1, 2, 0, 1, 2, 0, 1)


def test_positions_of_text():
    assert text_positions(3, start=2, axes=2).tolist() == [[2, 3, 4]] * 2
    assert grid_positions(0, 3).shape == (2, 0)


def test_the_smallest_integer_has_no_row():
    """The magnitude of the smallest integer is negative again, so the result is NaN and nothing is read."""
    cos, sin = ropelab.rotary_table(8, 8)
    positions = torch.tensor([[-(2**63), 2**63 - 1, 8, -8, -7]])
    found = ropelab.axial_tables(cos, sin, positions, [0] * 4)
    for y, row in zip(found, (cos[7], -sin[7]), strict=True):
        assert y[:4].isnan().all() and torch.equal(y[4], row)
