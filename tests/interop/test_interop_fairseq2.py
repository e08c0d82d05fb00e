"""fairseq2's encoders and our models of them: the contract, both layouts, padding, packing, decoding."""

from types import SimpleNamespace

import pytest
import torch

from ropelab import conformance, reference, rotary_table
from ropelab.angles.frequencies import yarn
from ropelab.angles.tables import frequency_tables
from ropelab.interop.fairseq2 import LAYOUTS, BatchLayout, DualRotaryEncoder, KernelRotaryEncoder, YaRNRotaryEncoder
from ropelab.study.documents.fairseq2 import evidence, peers
from tests.interop.fairseq2_models import MODELS, ReferenceRotaryEncoder, RotaryEncoder
from tests.support import older

ENCODERS = (RotaryEncoder, ReferenceRotaryEncoder, KernelRotaryEncoder)
E, MAX = 16, 32

encoders = pytest.mark.parametrize("encoder_class", ENCODERS)
impls = pytest.mark.parametrize("impl", LAYOUTS)


class QAndK(torch.nn.Module):
    """An encoder as the conformance tool calls modules."""

    def __init__(self, head_dim, encoder_class, impl):
        super().__init__()
        self.encoder = encoder_class(head_dim, 2**17, impl=impl)

    def forward(self, q, k):
        return tuple(self.encoder(x, BatchLayout(x.shape[:2])) for x in (q, k))


NOT_CLAIMED = ("empty", "large_positions", "compile")
"""fairseq2 has no layout without tokens, and serves positions below max_seq_len; it is compiled elsewhere."""


@encoders
@impls
def test_the_laws_hold(encoder_class, impl):
    report = conformance.verify(
        lambda head_dim: QAndK(head_dim, encoder_class, impl), "module", seq_format="bshd", layout=LAYOUTS[impl],
        maths="wide", skip=NOT_CLAIMED, shrink=False,
    )  # fmt: skip
    assert not report.failed, conformance.report.text(report)
    assert report.passed


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


@encoders
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
def test_every_token_turns_by_its_position(encoder_class, impl, shape, lengths, packed, step):
    """The gradient of every token turns backwards by the same position, under a random cotangent."""
    encoder = encoder_class(E, MAX, impl=impl).eval()
    layout = BatchLayout(shape[: 1 if packed else 2], lengths, packed=packed)
    if step is not None and layout.padded and encoder_class is not KernelRotaryEncoder:
        pytest.skip("no case of its own: test_padding_while_decoding_reads_a_row has it, on every machine")
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


@encoders
@impls
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_computes_in_float32_and_casts_back(encoder_class, impl, dtype):
    x, _ = seqs_and_cotangent(2, 5, 3, E, dtype=dtype)
    y = encoder_class(E, MAX, impl=impl)(x, BatchLayout((2, 5)))
    assert y.dtype == dtype
    wide = encoder_class(E, MAX, impl=impl)(x.float(), BatchLayout((2, 5)))
    assert torch.equal(y, wide.to(dtype)) or dtype == torch.float64
    torch.testing.assert_close(y.float(), wide, rtol=1e-3, atol=1e-5)


def test_the_layouts_are_permutations_of_one_another():
    rows = list(evidence.permutations(MODELS))
    assert len(rows) == 2 * len(ENCODERS) and all(row["equal"] for row in rows)


def test_the_formulas_are_the_same():
    rows = list(evidence.formulas(MODELS))
    assert len(rows) == 8 and all(row["equal"] for row in rows)


@encoders
def test_state(encoder_class):
    encoder = encoder_class(E, MAX)
    assert not encoder.state_dict() and not list(encoder.parameters())
    fresh = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    if encoder_class is KernelRotaryEncoder:
        assert {name: tuple(b.shape) for name, b in fresh.items()} == {"cos": (MAX, E // 2), "sin": (MAX, E // 2)}
    else:
        assert all(len(buffer) == MAX + 1 and not buffer[0].any() and buffer[1:].any() for buffer in fresh.values())
    empty = encoder_class(E, MAX, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert all(torch.equal(buffer, fresh[name]) for name, buffer in empty.named_buffers())


@encoders
@impls
@pytest.mark.parametrize("packed", [False, True])
def test_padding_becomes_zero_and_gets_no_gradient(encoder_class, impl, packed):
    layout = BatchLayout((7,), [2, 3], packed=True) if packed else BatchLayout((2, 7), [7, 5])
    x, cotangent = seqs_and_cotangent(*layout.position_indices.shape, 2, E)
    x.requires_grad_()
    y = encoder_class(E, MAX, impl=impl)(x, layout)
    (gradient,) = torch.autograd.grad(y, x, cotangent)
    padding = layout.position_indices < 0
    assert padding.sum() == 2
    for z in (y, gradient):
        assert not z[padding].any() and z[~padding].any(dim=-1).all()


@encoders
def test_poisoned_padding(encoder_class):
    """A product with zero keeps NaN; the kernel writes zeros."""
    x, _ = seqs_and_cotangent(1, 4, E)
    x[:, 3] = float("nan")
    y = encoder_class(E, MAX)(x, BatchLayout((1, 4), [3]))
    assert y[:, :3].isfinite().all()
    assert y[:, 3].isnan().all() if encoder_class is not KernelRotaryEncoder else not y[:, 3].any()


def test_padding_stays_zero_while_decoding():
    """The row of padding is found by its index, not by the row that step_nr makes of the index."""
    encoder, bag = KernelRotaryEncoder(E, MAX).eval(), SimpleNamespace(step_nr=3)
    for shape, layout in (((2, 4, E), BatchLayout((2, 4), [4, 2])), ((9, E), BatchLayout((9,), [4, 3], packed=True))):
        x, _ = seqs_and_cotangent(*shape)
        x = x.masked_fill((layout.position_indices < 0)[..., None], float("nan"))
        y = encoder(x, layout, state_bag=bag)
        assert not y[layout.position_indices < 0].any() and y[layout.position_indices >= 0].isfinite().all()


@pytest.mark.parametrize("encoder_class", [RotaryEncoder, ReferenceRotaryEncoder])
def test_padding_while_decoding_reads_a_row(encoder_class):
    """As in fairseq2, the row is step_nr, so padding turns by position step_nr - 1 and is not zero."""
    encoder, bag = encoder_class(E, MAX).eval(), SimpleNamespace(step_nr=3)
    x, _ = seqs_and_cotangent(2, 4, 2, E)
    y = encoder(x, BatchLayout((2, 4), [4, 2]), state_bag=bag)
    as_if = encoder(x[1:, 2:3], BatchLayout((1, 1)), state_bag=SimpleNamespace(step_nr=2))
    torch.testing.assert_close(y[1:, 2:3], as_if)


@encoders
def test_the_state_bag_counts_only_while_decoding(encoder_class):
    encoder, bag, layout = encoder_class(E, MAX), SimpleNamespace(step_nr=3), BatchLayout((2, 4))
    x, _ = seqs_and_cotangent(2, 4, E)
    at_start = encoder(x, layout)
    assert torch.equal(encoder.train()(x, layout, state_bag=bag), at_start)
    assert not torch.equal(encoder.eval()(x, layout, state_bag=bag), at_start)


@pytest.mark.parametrize("encoder_class", [RotaryEncoder, KernelRotaryEncoder])
@impls
def test_other_frequencies(encoder_class, impl):
    def halved(encoder):
        assert encoder.encoding_dim == E
        return 0.5 / encoder.theta ** (torch.arange(0, E, 2) / E)

    x, _ = seqs_and_cotangent(1, 9, E)
    slow = encoder_class(E, MAX, impl=impl, freqs_init_fn=halved)(x[:, :1].expand(-1, 9, -1), BatchLayout((1, 9)))
    fast = encoder_class(E, MAX, impl=impl)(x[:, :1].expand(-1, 5, -1), BatchLayout((1, 5)))
    torch.testing.assert_close(slow[:, ::2], fast)


@encoders
def test_strided_input(encoder_class):
    x, _ = seqs_and_cotangent(5, 2, 3, E)
    view = x.transpose(0, 1)
    encoder = encoder_class(E, MAX)
    assert torch.equal(encoder(view, BatchLayout((2, 5))), encoder(view.contiguous(), BatchLayout((2, 5))))


@encoders
def test_wrong_arguments(encoder_class):
    with pytest.raises(ValueError, match="encoding_dim: expected a positive even number, got 7"):
        encoder_class(7, MAX)
    with pytest.raises(ValueError, match="impl: expected one of .'llama', 'reference'., got 'neox'"):
        encoder_class(E, MAX, impl="neox")
    encoder = encoder_class(E, MAX)
    with pytest.raises(ValueError, match=r"seqs: expected shape \[N, S, \*, 16\], got \(2, 4, 8\)"):
        encoder(torch.zeros(2, 4, 8), BatchLayout((2, 4)))
    with pytest.raises(ValueError, match=r"seqs: expected shape \[N, S, \*, 16\], got \(4, 16\)"):
        encoder(torch.zeros(4, 16), BatchLayout((2, 4)))
    with pytest.raises(ValueError, match="seqs: expected positions below max_seq_len = 32, got 32"):
        encoder(torch.zeros(1, 33, E), BatchLayout((1, 33)))
    with pytest.raises(ValueError, match="seqs: expected positions below max_seq_len = 32, got 33"):
        encoder.eval()(torch.zeros(1, 4, E), BatchLayout((1, 4)), state_bag=SimpleNamespace(step_nr=30))
    # A padded batch may be wider than the tables; only its sequences may not be longer.
    encoder(torch.zeros(1, 40, E), BatchLayout((1, 40), [32]))


@pytest.mark.parametrize(
    ("shape", "lengths", "packed", "message"),
    [
        ((4,), None, False, r"shape: expected \(N, S\), got \(4,\)"),
        ((2, 4), None, True, r"shape: expected \(S,\), got \(2, 4\)"),
        ((2, 0), None, False, "shape"),
        ((2, 4), [4], False, r"seq_lens: expected lengths >= 1 that fit into shape \(2, 4\), got \[4\]"),
        ((2, 4), [4, 5], False, "seq_lens"),
        ((2, 4), [4, 0], False, "seq_lens"),
        ((4,), [3, 2], True, "seq_lens"),
        ((4,), [], True, "seq_lens"),
    ],
)
def test_wrong_layouts(shape, lengths, packed, message):
    with pytest.raises(ValueError, match=message):
        BatchLayout(shape, lengths, packed=packed)


@pytest.mark.skipif(bool(older("torch")), reason=f"torch 2.11 compiles a second time; {older('torch')}")
@pytest.mark.parametrize("encoder_class", [RotaryEncoder, ReferenceRotaryEncoder])
@impls
def test_compiled_once_for_all_lengths(encoder_class, impl):
    """One graph also serves all batches above 1; the longest sequence that the tables serve is among the lengths."""
    compilations = []

    def backend(module, inputs):
        compilations.append(module)
        return module.forward

    torch._dynamo.reset()
    encoder = encoder_class(E, MAX, impl=impl)
    compiled = torch.compile(encoder, backend=backend, fullgraph=True)
    for batch, length in ((4, 9), (2, 7), (3, MAX), (5, 8)):
        x, _ = seqs_and_cotangent(batch, length, E)
        for axis in (0, 1):
            torch._dynamo.maybe_mark_dynamic(x, axis)
        layout = BatchLayout((batch, length))
        torch.testing.assert_close(compiled(x, layout), encoder(x, layout))
    assert len(compilations) == 1


@pytest.fixture
def released():
    """fairseq2 as released."""
    return peers.released()


@pytest.mark.peers
def test_the_released_encoders_have_the_bits_of_the_models(released):
    rows = evidence.kept(MODELS, released)
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


def test_other_encoders_name_wrong_arguments():
    with pytest.raises(ValueError, match="encoding_dim: expected a multiple of 4, got 6"):
        DualRotaryEncoder(6, 8)
    with pytest.raises(ValueError, match="dual_theta: expected a finite number > 0, got 0"):
        DualRotaryEncoder(8, 8, dual_theta=0)
    with pytest.raises(ValueError, match="scale_factor: expected a finite number > 0, got -1"):
        YaRNRotaryEncoder(8, 8, scale_factor=-1, original_max_seq_len=4)
    with pytest.raises(ValueError, match="original_max_seq_len: expected an integer >= 1, got 0"):
        YaRNRotaryEncoder(8, 8, scale_factor=2, original_max_seq_len=0)
    with pytest.raises(ValueError, match="beta_fast: expected at least beta_slow = 2.0, got 1.0"):
        YaRNRotaryEncoder(8, 8, scale_factor=2, original_max_seq_len=4, beta_fast=1, beta_slow=2)
    with pytest.raises(ValueError, match="theta: expected a number > 1"):
        YaRNRotaryEncoder(8, 8, theta=1, scale_factor=2, original_max_seq_len=4)


@pytest.mark.gpu
@encoders
@impls
def test_on_a_gpu(encoder_class, impl):
    for dtype in (torch.bfloat16, torch.float32):
        x, _ = seqs_and_cotangent(2, 300, 4, E, dtype=dtype)
        layout = BatchLayout((2, 300), [300, 7])
        here = encoder_class(E, 300, impl=impl)(x, layout)
        layout.position_indices = layout.position_indices.cuda()
        there = encoder_class(E, 300, impl=impl, device="cuda")(x.cuda(), layout).cpu()
        torch.testing.assert_close(there, here, rtol=2e-2, atol=1e-3)
