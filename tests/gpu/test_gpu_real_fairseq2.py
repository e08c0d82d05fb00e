"""fairseq2's own encoders on a GPU: the pull request's against the definition, the released ones against ours."""

import pytest
import torch

from ropelab.interop import fairseq2 as interop
from ropelab.study.documents import fairseq2

pytestmark = [pytest.mark.gpu, pytest.mark.peers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", fairseq2.DIRECTIONS)
def test_the_code_is_right_eager_and_compiled(dtype, direction):
    """Each token is within the bound of float32 angles, as in the check of the studies before they time the code."""
    cell = fairseq2.Cell(3, 300, 128, dtype)
    _, contenders = fairseq2._compiled_for(cell)
    (call,) = fairseq2._calls(cell, direction, sets=1)
    outcomes = {
        (mode, name): fairseq2._check(
            call, encoder, interop.LAYOUTS[name.split()[1]], inverse=direction != fairseq2.DIRECTIONS[0]
        )
        for (mode, name), encoder in contenders.items()
    }
    assert len(outcomes) == 12 and set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.parametrize(
    "name, options",
    [("DualRotaryEncoder", {}), ("YaRNRotaryEncoder", {"scale_factor": 8.0, "original_max_seq_len": 64})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drop_in_encoders_are_fairseq2s(name, options, dtype):
    released = fairseq2.released()
    device = torch.device("cuda")
    theirs, ours = (getattr(m, name)(128, 512, device=device, **options) for m in (released, interop))
    layout = released.BatchLayout((2, 512), [512, 300], device=device)
    x, cotangent = (torch.randn(2, 512, 8, 128, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    token = layout.position_indices >= 0
    size = getattr(ours, "attention_scaling", 1.0) * max(x.abs().max().item(), cotangent.abs().max().item())
    close = {"rtol": 0, "atol": size * (2.0**-24 * (8 * 512 + 8) + torch.finfo(dtype).eps)}
    results = []
    for encoder in (ours, theirs):
        y = encoder(x, layout)
        results.append((y.detach(), *torch.autograd.grad(y, x, cotangent)))
    for mine, their in zip(*results, strict=True):
        torch.testing.assert_close(mine[token].double(), their[token].double(), **close)
        assert not mine[~token].any()
