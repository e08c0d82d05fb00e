"""fairseq2's encoders over our kernels: the contract, both layouts, padding, packing, decoding."""

from types import SimpleNamespace

import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.angles.frequencies import yarn
from ropelab.angles.tables import frequency_tables
from ropelab.interop.fairseq2 import LAYOUTS, BatchLayout, DualRotaryEncoder, KernelRotaryEncoder, YaRNRotaryEncoder
from ropelab.study.documents import fairseq2

E, MAX = 16, 32
impls = pytest.mark.parametrize("impl", LAYOUTS)


def seqs_and_cotangent(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def definition(x, impl, positions, inverse=False):
    """The definition for ``x`` with two leading axes, or with one and ``positions`` (None for padding)."""
    cos, sin = rotary_table(MAX, E, dtype=torch.float64)
    heads = x.reshape(*x.shape[: positions.ndim], -1, E)
    batched = heads if positions.ndim == 2 else heads.unsqueeze(0)
    rows = positions.expand(batched.shape[:2])
    y = reference.rotate(batched, cos, sin, layout=LAYOUTS[impl], positions=rows.clamp(min=0), inverse=inverse)
    return torch.where((rows < 0)[..., None, None], 0.0, y).reshape(x.shape)


@impls
@pytest.mark.parametrize(
    ("shape", "lengths", "packed"),
    [
        ((3, 7, E), None, False),
        ((3, 7, 2, E), None, False),
        ((2, 5, 2, 3, E), None, False),
        ((1, 1, 1, E), None, False),
        ((3, 7, 2, E), [7, 1, 4], False),
        ((9, 2, E), None, True),
        ((9, 2, E), [4, 3], True),
        ((9, E), [1, 1, 7], True),
    ],
)
@pytest.mark.parametrize("step", [None, 6])
def test_every_token_turns_by_its_position(impl, shape, lengths, packed, step):
    """The gradient of every token turns backwards by the same position; padding is zero, and so is its gradient."""
    encoder = KernelRotaryEncoder(E, MAX, impl=impl).eval()
    layout = BatchLayout(shape[: 1 if packed else 2], lengths, packed=packed)
    x, cotangent = seqs_and_cotangent(*shape)
    x.requires_grad_()
    y = encoder(x, layout, state_bag=None if step is None else SimpleNamespace(step_nr=step))
    (gradient,) = torch.autograd.grad(y, x, cotangent)
    positions = torch.where(layout.position_indices < 0, -1, layout.position_indices + (step or 0))  # -1: zeros
    if not packed:
        assert positions.shape == shape[:2]
    assert y.dtype == x.dtype and y.shape == x.shape
    # Angles in float32: positions below MAX times a frequency, a few roundings of 2**-24; and those of the result.
    close = {"rtol": 0, "atol": 2.0**-24 * (8 * MAX + 8) * x.abs().max().item()}
    torch.testing.assert_close(y.double(), definition(x.detach(), impl, positions), **close)
    torch.testing.assert_close(gradient.double(), definition(cotangent, impl, positions, inverse=True), **close)


@impls
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_computes_in_float32_and_casts_back(impl, dtype):
    x, _ = seqs_and_cotangent(2, 5, 3, E, dtype=dtype)
    y = KernelRotaryEncoder(E, MAX, impl=impl)(x, BatchLayout((2, 5)))
    assert y.dtype == dtype
    wide = KernelRotaryEncoder(E, MAX, impl=impl)(x.float(), BatchLayout((2, 5)))
    assert torch.equal(y, wide.to(dtype)) or dtype == torch.float64
    torch.testing.assert_close(y.float(), wide, rtol=1e-3, atol=1e-5)


def test_state():
    encoder = KernelRotaryEncoder(E, MAX)
    assert not encoder.state_dict() and not list(encoder.parameters())
    fresh = dict(encoder.named_buffers())
    assert {name: tuple(b.shape) for name, b in fresh.items()} == {"cos": (MAX, E // 2), "sin": (MAX, E // 2)}
    empty = KernelRotaryEncoder(E, MAX, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert all(torch.equal(buffer, fresh[name]) for name, buffer in empty.named_buffers())


def test_padding_stays_zero_while_decoding():
    """The row of padding is found by its index, not by the row that step_nr makes of the index."""
    encoder, bag = KernelRotaryEncoder(E, MAX).eval(), SimpleNamespace(step_nr=3)
    for shape, layout in (((2, 4, E), BatchLayout((2, 4), [4, 2])), ((9, E), BatchLayout((9,), [4, 3], packed=True))):
        x, _ = seqs_and_cotangent(*shape)
        x = x.masked_fill((layout.position_indices < 0)[..., None], float("nan"))
        y = encoder(x, layout, state_bag=bag)
        assert not y[layout.position_indices < 0].any() and y[layout.position_indices >= 0].isfinite().all()


def test_the_state_bag_counts_only_while_decoding():
    encoder, bag, layout = KernelRotaryEncoder(E, MAX), SimpleNamespace(step_nr=3), BatchLayout((2, 4))
    x, _ = seqs_and_cotangent(2, 4, E)
    at_start = encoder(x, layout)
    assert torch.equal(encoder.train()(x, layout, state_bag=bag), at_start)
    assert not torch.equal(encoder.eval()(x, layout, state_bag=bag), at_start)


@impls
def test_other_frequencies(impl):
    def halved(encoder):
        assert encoder.encoding_dim == E
        return 0.5 / encoder.theta ** (torch.arange(0, E, 2) / E)

    x, _ = seqs_and_cotangent(1, 9, E)
    slow = KernelRotaryEncoder(E, MAX, impl=impl, freqs_init_fn=halved)(x[:, :1].expand(-1, 9, -1), BatchLayout((1, 9)))
    fast = KernelRotaryEncoder(E, MAX, impl=impl)(x[:, :1].expand(-1, 5, -1), BatchLayout((1, 5)))
    torch.testing.assert_close(slow[:, ::2], fast)


WRONG = {"scale_factor": 2, "original_max_seq_len": 4}


@pytest.mark.parametrize(
    "argument, call",
    [
        ("encoding_dim", lambda: KernelRotaryEncoder(7, MAX)),
        ("impl", lambda: KernelRotaryEncoder(E, MAX, impl="neox")),
        ("encoding_dim", lambda: DualRotaryEncoder(6, 8)),
        ("dual_theta", lambda: DualRotaryEncoder(8, 8, dual_theta=0)),
        ("scale_factor", lambda: YaRNRotaryEncoder(8, 8, **WRONG | {"scale_factor": -1})),
        ("original_max_seq_len", lambda: YaRNRotaryEncoder(8, 8, **WRONG | {"original_max_seq_len": 0})),
        ("beta_fast", lambda: YaRNRotaryEncoder(8, 8, **WRONG, beta_fast=1, beta_slow=2)),
        ("theta", lambda: YaRNRotaryEncoder(8, 8, **WRONG, theta=1)),
    ],
)
def test_wrong_arguments_are_named(argument, call):
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        call()


def test_tokens_beyond_the_tables_or_of_another_shape():
    encoder = KernelRotaryEncoder(E, MAX)
    for shape, batch in (((2, 4, 8), (2, 4)), ((4, 16), (2, 4)), ((1, 33, E), (1, 33))):
        with pytest.raises(ValueError, match="^seqs: expected"):
            encoder(torch.zeros(shape), BatchLayout(batch))
    with pytest.raises(ValueError, match="^seqs: expected positions below max_seq_len = 32, got 33"):
        encoder.eval()(torch.zeros(1, 4, E), BatchLayout((1, 4)), state_bag=SimpleNamespace(step_nr=30))
    # A padded batch may be wider than the tables; only its sequences may not be longer.
    encoder(torch.zeros(1, 40, E), BatchLayout((1, 40), [32]))


@pytest.mark.parametrize(
    ("shape", "lengths", "packed"),
    [((4,), None, False), ((2, 4), None, True), ((2, 0), None, False), ((2, 4), [4], False), ((2, 4), [4, 5], False),
     ((2, 4), [4, 0], False), ((4,), [3, 2], True), ((4,), [], True)],
)  # fmt: skip
def test_wrong_layouts(shape, lengths, packed):
    with pytest.raises(ValueError, match="^shape: " if lengths is None else "^seq_lens: "):
        BatchLayout(shape, lengths, packed=packed)


@pytest.fixture
def released():
    """fairseq2 as released."""
    return fairseq2.released()


@pytest.mark.peers
def test_the_released_encoders_have_the_bits_of_those_of_the_pull_request():
    rows = fairseq2.defaults()
    assert rows.equal.all(), rows[~rows.equal]
    assert "fairseq2 0." in rows.attrs["source"]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("shape", "lengths", "packed"),
    [((2, 4), None, False), ((2, 4), [4, 1], False), ((6,), [2, 3], True), ((6,), [2, 4], True), ((6,), None, True)],
)
def test_our_batch_layout_is_theirs(shape, lengths, packed, released):
    ours, theirs = (c(shape, lengths, packed=packed) for c in (BatchLayout, released.BatchLayout))
    for name in ("width", "packed", "padded", "max_seq_len"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert torch.equal(ours.position_indices, theirs.position_indices)


# ------------------------------------------------------------------------------------- the encoders with other angles

YARN = {"scale_factor": 8.0, "original_max_seq_len": 64, "theta": 500_000.0}
OTHERS = {
    "dual": (DualRotaryEncoder, {}),
    "dual, other bases": (DualRotaryEncoder, {"theta": 500.0, "dual_theta": 20.0}),
    "yarn": (YaRNRotaryEncoder, YARN),
    "yarn, other ramp": (YaRNRotaryEncoder, YARN | {"beta_fast": 4.0, "beta_slow": 0.25, "truncate": False}),
    "yarn, quotient": (YaRNRotaryEncoder, YARN | {"mscale": 0.5, "mscale_all_dim": 2.0}),
    "yarn, mscale alone": (YaRNRotaryEncoder, YARN | {"mscale": 0.5}),
    "yarn, no mscale": (YaRNRotaryEncoder, YARN | {"mscale": 0.0, "mscale_all_dim": 2.0}),
    "yarn, shorter": (YaRNRotaryEncoder, YARN | {"scale_factor": 0.5}),
}
others = pytest.mark.parametrize("case", OTHERS)
CALLS = {
    # shape, lengths, packed, tokens decoded before (None: no state bag)
    "[N, S, E]": ((3, 7, 32), None, False, None),
    "[N, S, G, H, E]": ((3, 7, 2, 3, 32), None, False, None),
    "padded": ((3, 7, 2, 32), [7, 2, 5], False, None),
    "packed": ((9, 2, 32), [4, 3], True, None),
    "decoding": ((3, 1, 2, 32), None, False, 40),
    "decoding, padded": ((3, 7, 2, 32), [7, 2, 5], False, 5),
}


@pytest.mark.peers
@others
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_angles_are_fairseq2s(case, call, dtype, released):
    """Forward and gradient agree, with fairseq2's own BatchLayout and IncrementalStateBag.

    fairseq2's frequencies and angles are products in float32: at a position below 64, an angle is off by 64 times a few
    roundings, and every cosine by as much.
    """
    encoder_class, options = OTHERS[case]
    shape, lengths, packed, step = CALLS[call]
    ours = encoder_class(32, 64, **options).eval()
    theirs = getattr(released, encoder_class.__name__)(32, 64, **options).eval()
    layout = released.BatchLayout(shape[: 1 if packed else 2], lengths, packed=packed)
    bag = None
    if step is not None:
        bag = released.IncrementalStateBag(64)
        bag.increment_step_nr(step)
    x, cotangent = seqs_and_cotangent(*shape, dtype=dtype)
    x.requires_grad_()
    found, expected = [], []
    for encoder, results in ((ours, found), (theirs, expected)):
        y = encoder(x, layout, state_bag=bag)
        results += [y.detach(), *torch.autograd.grad(y, x, cotangent)]
    token = layout.position_indices >= 0
    factor = getattr(ours, "attention_scaling", 1.0)
    for y, z, source in zip(found, expected, (x.detach(), cotangent), strict=True):
        size = factor * source.abs().max().item()
        close = {"rtol": 0, "atol": size * (2.0**-24 * (8 * 64 + 8) + torch.finfo(dtype).eps)}
        assert y.dtype == z.dtype == dtype
        torch.testing.assert_close(y[token].double(), z[token].double(), **close)
        assert not y[~token].any()


@pytest.mark.peers
def test_fairseq2_rotates_padding_while_decoding(released):
    """Padding turns by the position before the call's first token, because its row lies ``step_nr`` rows further on."""
    bag = released.IncrementalStateBag(64)
    bag.increment_step_nr(3)
    before = released.IncrementalStateBag(64)
    before.increment_step_nr(2)
    x, _ = seqs_and_cotangent(2, 4, 2, 32)
    layout = released.BatchLayout((2, 4), [4, 2])
    for name, options in (("RotaryEncoder", {}), ("DualRotaryEncoder", {}), ("YaRNRotaryEncoder", YARN)):
        encoder = getattr(released, name)(32, 64, **options).eval()
        padding = encoder(x, layout, state_bag=bag)[1, 2:]
        as_if = encoder(x[1, 2:].unsqueeze(1), released.BatchLayout((2, 1), None), state_bag=before).squeeze(1)
        torch.testing.assert_close(padding, as_if, rtol=0, atol=0)
        assert padding.any()


@others
def test_other_angles_are_right_to_a_rounding(case):
    """The tables against the definition in float64."""
    encoder_class, options = OTHERS[case]
    encoder = encoder_class(32, 64, **options)
    if encoder_class is DualRotaryEncoder:
        halves = [rotary_table(64, 16, base, dtype=torch.float64) for base in (encoder.theta, encoder.dual_theta)]
        expected = [torch.cat(tables, dim=-1) for tables in zip(*halves, strict=True)]
    else:
        frequencies = yarn(32, encoder.theta, encoder.scale_factor, 64, beta_fast=encoder.beta_fast,
                           beta_slow=encoder.beta_slow, truncate=encoder.truncate)  # fmt: skip
        expected = frequency_tables(frequencies, 64, encoder.attention_scaling, dtype=torch.float64)
    for table, wide in zip((encoder.cos, encoder.sin), expected, strict=True):
        assert torch.equal(table, wide.float())


@others
def test_other_encoders_keep_the_contract(case):
    encoder_class, options = OTHERS[case]
    encoder = encoder_class(32, 64, **options)
    assert not encoder.state_dict() and not list(encoder.parameters())
    empty = encoder_class(32, 64, device="meta", **options).to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.cos, encoder.cos) and torch.equal(empty.sin, encoder.sin)
    x, _ = seqs_and_cotangent(2, 5, 3, 32, dtype=torch.float64)
    assert encoder(x, BatchLayout((2, 5))).dtype == torch.float64
    with pytest.raises(ValueError, match="seqs: expected positions below max_seq_len = 64, got 64"):
        encoder(torch.zeros(1, 65, 32), BatchLayout((1, 65)))


@pytest.mark.gpu
@impls
def test_on_a_gpu(impl):
    for dtype in (torch.bfloat16, torch.float32):
        x, _ = seqs_and_cotangent(2, 300, 4, E, dtype=dtype)
        layout = BatchLayout((2, 300), [300, 7])
        here = KernelRotaryEncoder(E, 300, impl=impl)(x, layout)
        layout.position_indices = layout.position_indices.cuda()
        there = KernelRotaryEncoder(E, 300, impl=impl, device="cuda")(x.cuda(), layout).cpu()
        torch.testing.assert_close(there, here, rtol=2e-2, atol=1e-3)
