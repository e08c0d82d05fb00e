"""The pull request's own encoders, run from its file, and ours turn tokens by the definition, within a bound.

The file is no part of the project: ``python -m ropelab.study peers`` puts it into ``build/peers``.
"""

import sys

import pytest
import torch

from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench.packages import NotInstalled
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.fairseq2 import LAYOUTS, KernelRotaryEncoder
from ropelab.study.documents import fairseq2

E, LONGEST = 32, 64
CALLS = {
    # shape, lengths, packed, tokens decoded before (None: no state bag)
    "[N, S, E]": ((3, 7, E), None, False, None),
    "[N, S, H, E]": ((3, 7, 2, E), None, False, None),
    "[N, S, G, H, E]": ((3, 7, 2, 3, E), None, False, None),
    "padded": ((3, 7, 2, E), [7, 2, 5], False, None),
    "packed": ((9, 2, E), [4, 5], True, None),
    "packed, padded": ((9, 2, E), [4, 3], True, None),
    "decoding": ((3, 1, 2, E), None, False, 40),
    "decoding, padded": ((3, 7, 2, E), [7, 2, 5], False, 5),
    "decoding, packed": ((9, 2, E), [4, 3], True, 5),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def code():
    """The pull request's own classes."""
    return fairseq2.proposed()


def both_directions(encoder, code, call, dtype):
    """The result and the gradient of one call, the positions of its tokens (-1: padding), x and the cotangent."""
    shape, lengths, packed, step = CALLS[call]
    layout = code.BatchLayout(shape[: 1 if packed else 2], lengths, packed=packed)
    bag = None
    if step is not None:
        bag = code.IncrementalStateBag(LONGEST)
        bag.increment_step_nr(step)
    generator = torch.Generator().manual_seed(3)
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    y = encoder.eval()(x, layout, state_bag=bag)
    positions = torch.where(layout.position_indices < 0, -1, layout.position_indices + (step or 0))
    return (y.detach(), *torch.autograd.grad(y, x, cotangent)), positions, (x.detach(), cotangent)


@pytest.mark.peers
@pytest.mark.parametrize("name", [*fairseq2.CLASSES, "ropelab"])
@pytest.mark.parametrize("impl", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_encoder_turns_tokens_by_the_definition(name, impl, call, dtype, code):
    """An angle at a position below 64, in float32, is off by 64 times a few roundings, and a cosine by as much."""
    encoder_class = KernelRotaryEncoder if name == "ropelab" else getattr(code, fairseq2.CLASSES[name])
    found, positions, given = both_directions(encoder_class(E, LONGEST, impl=impl), code, call, dtype)
    token = positions >= 0
    turns = torch.outer(positions[token].double(), inverse_frequencies(E))
    for y, x, inverse in zip(found, given, (False, True), strict=True):
        heads = x.reshape(*positions.shape, -1, E)[token].double()
        truth = reference.rotate(
            heads.unsqueeze(0), turns.cos(), turns.sin(), layout=LAYOUTS[impl], inverse=inverse
        ).squeeze(0)
        stored = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        close = {"rtol": 0, "atol": x.abs().max().item() * (2.0**-24 * (8 * LONGEST + 8) + stored)}
        torch.testing.assert_close(y.reshape(*positions.shape, -1, E)[token].double(), truth, **close)


@pytest.mark.peers
def test_the_code_says_what_it_is(code):
    assert code.source.startswith(f"fairseq2 {fairseq2.COMMIT[:9]}, sha256 ")
    with pytest.raises(AttributeError, match="fairseq2 eb69a67ca, sha256 .*: no class Rotary"):
        code.Rotary  # noqa: B018


@pytest.mark.peers
def test_two_versions_do_not_meet(code):
    """Each version has classes of its own, and none is left behind as ``fairseq2``."""
    assert not [name for name in sys.modules if name.partition(".")[0] == "fairseq2"]
    released = fairseq2.released()
    assert released.BatchLayout is not code.BatchLayout
    assert all(sys.modules[module.__name__] is module for module in released.modules.values())


@pytest.mark.peers
def test_torch_compile_inlines_the_code(code):
    """Dynamo imports the module of every function that it inlines, by name; widths of the layout become dynamic."""
    compilations = []

    def backend(module, inputs):
        compilations.append(module)
        return module.forward

    torch._dynamo.reset()
    encoder = code.RotaryEncoder(E, LONGEST, impl="reference")
    compiled = torch.compile(encoder, backend=backend, fullgraph=True)
    for batch, length in ((4, 9), (2, 7), (3, LONGEST), (5, 8)):
        x = torch.randn(batch, length, 2, E)
        for axis in (0, 1):
            torch._dynamo.maybe_mark_dynamic(x, axis)
        layout = code.BatchLayout((batch, length), None)
        assert torch.equal(compiled(x, layout), encoder(x, layout))
    assert len(compilations) == 2


def test_without_the_file_nothing_runs_in_its_place(monkeypatch, tmp_path):
    def missing(repository, commit, path):
        raise NotInstalled(f"{repository} at {commit[:9]}: {path} is not there (python -m ropelab.study peers)")

    monkeypatch.setattr(fairseq2.packages, "file_at", missing)
    fairseq2.proposed.cache_clear()
    try:
        with pytest.raises(Unavailable, match="python -m ropelab.study peers"):
            fairseq2.grid(smoke=True)
    finally:
        fairseq2.proposed.cache_clear()
