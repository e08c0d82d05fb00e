"""Cosines and sines that the kernel computes are near the exact values, and nothing else changes."""

import math
from functools import partial

import pytest
import torch
from mpmath import mp

import ropelab
from ropelab.angles import frequencies as variants
from ropelab.angles.table_free import fixed_point
from ropelab.bench import table_free as bench
from ropelab.bench.exact_waves import exact_waves, ulps
from ropelab.bench.subjects import table_free
from ropelab.conformance import verify
from ropelab.conformance.report import text
from ropelab.kernels import INTERPRETED, NO_POSITION, angles_torch, use_backend
from ropelab.layout.pairing import LAYOUTS
from tests.support import draw

FOUR_MILLION = 2**22
FARTHEST = 2**31 - 1
PAIRS = 32
THETA = variants.inverse_frequencies(2 * PAIRS, 500_000.0)


def positions_up_to(end: int, count: int) -> torch.Tensor:
    drawn = torch.randint(end, (count,), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.arange(1000), drawn, torch.arange(end - 1000, end)))


def test_the_exact_waves_are_exact():
    positions = positions_up_to(FOUR_MILLION, 20)[::53]
    with mp.workprec(200):
        for row, waves in zip(positions.tolist(), zip(*exact_waves(positions, THETA), strict=True), strict=True):
            for theta, cos, sin in zip(THETA.tolist(), *waves, strict=True):
                angle = mp.mpf(row) * mp.mpf(theta)
                for wave, found in ((mp.cos(angle), cos.item()), (mp.sin(angle), sin.item())):
                    assert abs(wave - found) <= 4e-16 * abs(wave)


def test_are_right_within_an_ulp_up_to_four_million():
    positions = positions_up_to(FOUR_MILLION, 20_000)
    exact = exact_waves(positions, THETA)
    computed = angles_torch.cos_sin(positions, fixed_point(THETA))
    for found, wave in zip(computed, exact, strict=True):
        assert ulps(found, wave) <= 1
    # A float64 of the frequency, wrapped as it is, would not do: near zeros of the sine the last bits decide.
    assert ulps((positions[:, None] * THETA.float()).cos(), exact[0]) > 1000


def test_are_right_within_an_ulp_at_positions_of_int32():
    drawn = torch.randint(FARTHEST, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    positions = [0, 1, FARTHEST, 1 - FARTHEST, *drawn, *(-p for p in drawn)]
    computed = angles_torch.cos_sin(torch.tensor(positions), fixed_point(THETA))
    with mp.workprec(200):
        angles = [[mp.mpf(p) * mp.mpf(theta) for theta in THETA.tolist()] for p in positions]
        for found, wave in zip(computed, (mp.cos, mp.sin), strict=True):
            exact = torch.tensor([[float(wave(angle)) for angle in row] for row in angles], dtype=torch.float64)
            assert ulps(found, exact) <= 1


def test_opposite_positions_have_opposite_sines():
    positions = positions_up_to(FARTHEST, 1000)
    ahead, behind = (angles_torch.cos_sin(p, fixed_point(THETA)) for p in (positions, -positions))
    assert torch.equal(ahead[0], behind[0]) and torch.equal(ahead[1], -behind[1])


@pytest.mark.parametrize("theta", [THETA, torch.tensor([0.0, 1.0, 2 * math.pi, 1e-9, 7.25e5], dtype=torch.float64)])
def test_frequencies_have_96_bits_behind_the_point(theta):
    with mp.workprec(300):
        for value, (high, low, _) in zip(theta.tolist(), fixed_point(theta).tolist(), strict=True):
            turns = (mp.mpf(value) / (2 * mp.pi)) % 1
            found = mp.mpf(high % 2**64) / mp.mpf(2) ** 64 + mp.mpf(low) / mp.mpf(2) ** 96
            assert abs(turns - found) <= mp.mpf(2) ** -97 * 1.001


def test_the_study_measures_the_kernel(monkeypatch):
    """The study measures the kernel that runs here: at most an ulp of error in every octave, and errors of sines."""
    monkeypatch.setattr(bench, "LAST", 2**9)
    frame = bench.table_free_error(device="cuda" if torch.cuda.is_available() else "cpu")
    assert frame["first"].tolist() == [0, *(2**i for i in range(1, 9))] and frame["last"].max() == 2**9 - 1
    assert (frame[["cos_ulps", "sin_ulps"]] <= 1).all(axis=None) and (frame.iloc[1:].sin_ulps > 0.3).all()


# -------------------------------------------------------------------------------------------- in the rotation

WHERE = {
    "from 0": {},
    "offset": {"offsets": FOUR_MILLION},
    "offsets": {"offsets": torch.tensor([FOUR_MILLION, NO_POSITION, -3])},
    "positions": {"positions": torch.tensor([3, -FOUR_MILLION, NO_POSITION, 0, FARTHEST])},
    "int32": {"positions": torch.tensor([[1, 2, 3, 4, 5]] * 3, dtype=torch.int32)},
}


def moved(where: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in where.items()}


def tables_of_tokens(frequencies, seq_len, positions=None, offsets=0):
    """Tables of each token and batch, by which the same tokens turn without positions."""
    along = torch.arange(seq_len, device=frequencies.device)
    if positions is None:
        starts = torch.as_tensor(offsets, device=frequencies.device).reshape(-1, 1)
        positions = torch.where(starts == NO_POSITION, NO_POSITION, starts + along)
    positions = positions.expand(3, seq_len)
    return positions, *angles_torch.cos_sin(positions, frequencies)


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("seq_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotates_as_with_tables_of_the_same_waves(device, layout, seq_format, where):
    q, k = (draw(3, 5, heads, 20, seq_format=seq_format, dtype=torch.float16, device=device) for heads in (3, 2))
    frequencies, where = ropelab.rotary_frequencies(12, device=device), moved(where, device)
    positions, cos, sin = tables_of_tokens(frequencies, 5, **where)
    options = {"layout": layout, "seq_format": seq_format}
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, **options)
    actual = ropelab.apply_rope(q, k, frequencies=frequencies, **options, **where)
    gone = (positions == NO_POSITION)[:, :, None, None]
    for found, wanted in zip(actual, expected, strict=True):
        batch_first = {"bshd": (0, 1), "sbhd": (1, 0), "bhsd": (0, 2)}[seq_format]
        assert torch.equal(found, wanted.movedim(batch_first, (0, 1)).masked_fill(gone, 0).movedim((0, 1), batch_first))


def test_frequencies_of_other_strides(device):
    q = draw(2, 5, 3, 16, device=device)
    frequencies = ropelab.rotary_frequencies(16, device=device)
    expected = ropelab.apply_rope(q, frequencies=frequencies)
    wide = torch.zeros(8, 7, dtype=torch.int64, device=device)
    for other in (wide[:, 2:5], torch.empty(3, 8, dtype=torch.int64, device=device).t()):
        assert torch.equal(ropelab.apply_rope(q, frequencies=other.copy_(frequencies)), expected)


def test_another_width_is_another_launch(device):
    """Frequencies of all widths have the same strides: what was prepared for one must not serve another."""
    q = draw(2, 5, 3, 16, device=device)
    for rotary_dim in (16, 8, 16, 4):
        frequencies = ropelab.rotary_frequencies(rotary_dim, device=device)
        cos, sin = angles_torch.cos_sin(torch.arange(5, device=device), frequencies)
        assert torch.equal(ropelab.apply_rope(q, frequencies=frequencies), ropelab.apply_rope(q, cos=cos, sin=sin))


def test_positions_beyond_int32(device):
    q, frequencies = draw(1, 2, 3, 8, device=device), ropelab.rotary_frequencies(8, device=device)
    positions = torch.tensor([5, 2**40], device=device)
    if q.is_cuda:
        y = ropelab.apply_rope(q, frequencies=frequencies, positions=positions)
        assert y[:, 1].isnan().all() and y[:, 0].isfinite().all()
        return
    with pytest.raises(ValueError, match=r"positions: expected \|positions\| below the 2147483648"):
        ropelab.apply_rope(q, frequencies=frequencies, positions=positions)


def test_the_mark_of_a_position_without_a_row_is_no_position(device):
    q, frequencies = draw(1, 2, 3, 8, device=device), ropelab.rotary_frequencies(8, device=device)
    positions = torch.tensor([5, -FARTHEST], device=device)
    if q.is_cuda:
        y = ropelab.apply_rope(q, frequencies=frequencies, positions=positions)
        assert y[:, 1].isnan().all() and y[:, 0].isfinite().all()
        return
    for where in ({"positions": positions}, {"offsets": -FARTHEST}):
        (name,) = where
        with pytest.raises(
            ValueError, match=f"{name}: expected other numbers, because INVALID_POSITION .*, got -{FARTHEST}"
        ):
            ropelab.apply_rope(q, frequencies=frequencies, **where)


def test_a_model_with_an_attention_factor(device):
    """YaRN at its full length, beside its table: two roundings more than the table's, with a factor."""
    config = {
        "head_dim": 16, "max_position_embeddings": 4096, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024,
        },
    }  # fmt: skip
    rope = ropelab.rope_from_config(config)
    assert rope.attention_factor != 1
    q = torch.eye(16, device=device).expand(1, 4096, 16, 16)[:, 4090:]
    cos, sin = rope.tables(4096, device=device)
    expected = ropelab.apply_rope(q, cos=cos, sin=sin, offsets=4090)
    actual = ropelab.apply_rope(q, frequencies=rope.frequencies(device), offsets=4090)
    # float64 knows the angle to 2^-53 of itself, float32 rounds the waves by at most 1 ulp here and half of one there.
    torch.testing.assert_close(actual, expected, rtol=4 * 2.0**-24, atol=4096 * 2.0**-52)


def test_keeps_the_laws():
    device = "cpu" if INTERPRETED else "cuda"
    with use_backend("torch" if INTERPRETED else "triton"):  # the interpreter is slow
        report = verify(partial(table_free, layout="interleaved"), "plain", layout="interleaved", device=device)
    assert report.passed, text(report)


def test_frequencies_are_made_outside_of_what_is_compiled(device):
    from torch._dynamo.testing import CompileCounter  # which takes a second to import

    def rotate(q):
        return ropelab.apply_rope(q, frequencies=ropelab.rotary_frequencies(q.shape[-1], device=q.device))

    torch._dynamo.reset()
    q, compilations = draw(2, 5, 3, 8, device=device), CompileCounter()
    assert torch.equal(torch.compile(rotate, backend=compilations)(q), rotate(q))
    assert compilations.frame_count == 1
