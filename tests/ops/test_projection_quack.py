"""The path of `qkv_rope` that quack's kernel computes: its operands, its calls, and on a GPU its results."""

import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ropelab
from ropelab.bench import packages, peers
from ropelab.bench.projection import BY_QUACK as NAME
from ropelab.bench.projection import Projection, Tensors, contenders
from ropelab.kernels import Rotation, projection_quack, projection_torch
from ropelab.kernels.angles_torch import FACTOR, HIGH, LOW
from ropelab.kernels.tensors import ProjectionTensors

D, HEADS = 16, (2, 1)
ROTATION = Rotation(D, interleaved=True, out_interleaved=True, table_free=True)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(projection_quack, "_known", {})
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def given(batch=2, tokens=5, inputs=24, bias=False, dtype=torch.float32, rotary_dim=D):
    width = (HEADS[0] + 2 * HEADS[1]) * D
    frequencies = ropelab.rotary_frequencies(rotary_dim)
    made = torch.full((batch, tokens, width // D, D), float("nan"), dtype=dtype)
    return ProjectionTensors(
        None, None, torch.randn(batch, tokens, inputs, dtype=dtype), torch.randn(width, inputs, dtype=dtype),
        torch.randn(width, dtype=dtype) if bias else None, None, None, None, made, frequencies, frequencies, None,
    )  # fmt: skip


class Quack:
    """The two functions of ``quack.epilogue.rotary`` as its documentation promises them, in float64."""

    @staticmethod
    def rope_posfreq_epi(a, b, *, out, tuned, pos, freq, bias=None):
        assert not tuned and pos.dtype == freq.dtype == torch.float32 and pos.shape == (1, len(a))
        product = a.double() @ b.double() + (0 if bias is None else bias.double())
        turns = freq.double().unflatten(-1, (-1, 2)).sum(-1)
        angle = 2 * torch.pi * (pos.double()[0, :, None] * turns)
        x0, x1 = product.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        out["D"].copy_(torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2))

    rope_posfreq_bias_epi = rope_posfreq_epi


@pytest.mark.parametrize("rotary_dim", [D, D // 2])
@pytest.mark.parametrize("bias", [False, True])
def test_the_operands_are_those_of_the_definition(monkeypatch, bias, rotary_dim):
    monkeypatch.setattr(projection_quack, "_epilogues", lambda: Quack)
    t = given(bias=bias, rotary_dim=rotary_dim)
    right = t._replace(qkv=torch.empty_like(t.qkv))
    rotation = Rotation(rotary_dim, interleaved=True, out_interleaved=True, table_free=True)
    projection_quack.project(t, rotation, *HEADS, first_position=1000)
    projection_torch.project(right, rotation, *HEADS, first_position=1000)
    torch.testing.assert_close(t.qkv, right.qkv, rtol=1e-5, atol=1e-5)


def test_two_numbers_hold_a_frequency():
    """The sum of both is the frequency, modulo whole turns, within 2^-48 of it."""
    frequencies = ropelab.rotary_frequencies(D)
    columns = projection_quack._columns(frequencies, HEADS, D)
    assert columns.shape == (1, 4 * D) and not columns[0, 3 * D :].any()
    for row, (first, second) in zip(frequencies.tolist(), columns[0, :D].view(-1, 2).tolist(), strict=True):
        turns = Fraction(row[HIGH], 2**64) + Fraction(row[LOW], 2**96)
        distance = (Fraction(first) + Fraction(second) - turns) % 1
        assert min(distance, 1 - distance) <= turns / 2**48
    assert np.array_equal(columns[0, :D], columns[0, D : 2 * D])


def test_columns_are_kept_until_the_frequencies_change():
    frequencies = ropelab.rotary_frequencies(D)
    kept = projection_quack._columns(frequencies, HEADS, D)
    assert projection_quack._columns(frequencies, HEADS, D) is kept
    assert projection_quack._columns(frequencies, (1, 1), D).shape == (1, 3 * D)
    frequencies[:, HIGH] += 1 << 50
    assert not torch.equal(projection_quack._columns(frequencies, HEADS, D), kept)
    for _ in range(20):
        projection_quack._columns(frequencies.clone(), HEADS, D)
    assert len(projection_quack._known) == 16


def test_an_attention_factor_is_refused():
    frequencies = ropelab.rotary_frequencies(D)
    frequencies[:, FACTOR] = int(np.float32(1.5).view(np.int32))
    assert projection_quack._columns(frequencies, HEADS, D) is None


def test_a_capture_refuses_frequencies_that_no_call_had(monkeypatch):
    frequencies = ropelab.rotary_frequencies(D)
    known = projection_quack._columns(frequencies, HEADS, D)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert projection_quack._columns(frequencies, HEADS, D) is known
    assert projection_quack._columns(frequencies.clone(), HEADS, D) is None


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


REFUSED = {
    "tables": {"rotation": Rotation(D, interleaved=True, out_interleaved=True)},
    "halves": {"rotation": Rotation(D, table_free=True)},
    "the inverse": {"rotation": Rotation(D, interleaved=True, out_interleaved=True, table_free=True, transpose=True)},
    "positions": {"positions": torch.zeros(2, 5, dtype=torch.int64)},
    "a norm": {"q_weight": torch.ones(D, dtype=torch.bfloat16)},
    "a position before 0": {"first": -1},
    "a position that float32 has not": {"first": 2**24 - 4},
    "rows of other than whole 16 bytes": {"inputs": 12},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_quack_does_not_serve(monkeypatch, name):
    monkeypatch.setattr(projection_quack, "_epilogues", lambda: Quack)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    change = dict(REFUSED[name])
    rotation, first, inputs = change.pop("rotation", ROTATION), change.pop("first", 0), change.pop("inputs", 24)

    def served(t, rotation=ROTATION, first=0):
        t = t._replace(x=t.x.as_subclass(OnGpu))
        return projection_quack.serves(t, rotation, *HEADS, first)

    assert served(given(dtype=torch.bfloat16)) and not projection_quack.serves(given(), ROTATION, *HEADS)
    assert not served(given(dtype=torch.bfloat16, inputs=inputs)._replace(**change), rotation, first)


@pytest.mark.parametrize("installed", [None, "0.5.0", "0.6.5"])
def test_only_a_release_that_is_known_is_used(monkeypatch, installed):
    projection_quack._epilogues.cache_clear()
    rotary = SimpleNamespace()
    module = SimpleNamespace(__version__=installed, epilogue=SimpleNamespace(rotary=rotary))
    found = {"quack": module, "quack.epilogue": module.epilogue, "quack.epilogue.rotary": rotary}
    for name, value in found.items():
        monkeypatch.setitem(sys.modules, name, value if installed else None)
    try:
        assert projection_quack._epilogues() is (rotary if installed == "0.6.5" else None)
    finally:
        projection_quack._epilogues.cache_clear()


@pytest.mark.peers
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 2048, 4097])
def test_quack_on_a_gpu(tokens):
    """quack's kernel, through `qkv_rope`, is within the roundings of the definition in float64."""
    peers.quack.module(packages.locate(peers.quack.PACKAGE)[0], "quack.epilogue.rotary")
    projection_quack._epilogues.cache_clear()
    tensors = Tensors(Projection(tokens, 1024, 4, 2), "cuda")
    with torch.no_grad():
        assert tensors.check(contenders(tensors)[NAME].run) == "ok"
