"""fairseq2's own encoders on a GPU: the pull request's against the definition, the released ones against ours."""

import pytest
import torch

from ropelab.interop import fairseq2
from ropelab.study.documents.fairseq2 import encoders, measure, peers

pytestmark = [pytest.mark.gpu, pytest.mark.peers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", measure.DIRECTIONS)
def test_the_code_is_right_eager_and_compiled(dtype, direction):
    """Each token is within the bound of float32 angles, as in the check of the studies before they time the code."""
    encoders.proposed()
    cell = measure.Cell(3, 300, 128, dtype)
    _, contenders = measure._compiled_for(cell)
    (call,) = measure._calls(cell, direction, sets=1)
    outcomes = {
        (mode, name): measure._check(
            call, encoder, fairseq2.LAYOUTS[name.split()[1]], inverse=direction != measure.DIRECTIONS[0]
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
    released = peers.released()
    device = torch.device("cuda")
    theirs, ours = (getattr(m, name)(128, 512, device=device, **options) for m in (released, fairseq2))
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
