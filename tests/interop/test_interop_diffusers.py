"""The transformers of diffusers compute the same before and after the patch."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from ropelab.interop.calls import Understood  # noqa: E402
from ropelab.interop.diffusers import is_patched, patch, unpatch  # noqa: E402
from tests.models import diffusers_models  # noqa: E402


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel",
                                  "LTXVideoTransformer3DModel", "Lumina2Transformer2DModel"])  # fmt: skip
def test_results_and_gradients_stay(torch_backend, monkeypatch, name):
    served = []
    rotated = Understood.rotated
    monkeypatch.setattr(Understood, "rotated", lambda self, a: (served.append(y := rotated(self, a)), y)[1])
    found = diffusers_models.compare(name)
    assert found.status == "equal", found
    assert served and not any(y is None for y in served)


def test_undo_puts_everything_back():
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_wan

    model = diffusers_models.tiny_transformer("WanTransformer3DModel").model
    call, shared = transformer_wan.WanAttnProcessor.__call__, embeddings.apply_rotary_emb
    with patch(model) as patched:
        assert "WanAttnProcessor.__call__" in patched.functions
        assert transformer_wan.WanAttnProcessor.__call__ is not call
        again = patch(model)
        assert again.functions == [] and "already patched: WanAttnProcessor.__call__" in repr(again)
    assert transformer_wan.WanAttnProcessor.__call__ is not call and is_patched(model)
    unpatch(model)
    assert not is_patched(model)
    assert transformer_wan.WanAttnProcessor.__call__ is call and embeddings.apply_rotary_emb is shared


def test_calls_that_the_kernel_does_not_serve_go_to_the_original(torch_backend):
    from diffusers.models import embeddings

    original = embeddings.apply_rotary_emb
    model = diffusers_models.tiny_transformer("FluxTransformer2DModel").model
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    tables = tuple(torch.randn(5, 8) for _ in range(2))
    with patch(model):
        for options in ({}, {"sequence_dim": 2, "use_real_unbind_dim": -2}):
            expected = original(x, tables, **options)
            cotangent = torch.randn_like(x)
            found = embeddings.apply_rotary_emb(x, tables, **options)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(
                torch.autograd.grad(found, x, cotangent), torch.autograd.grad(expected, x, cotangent)
            )
        with pytest.raises(ValueError, match="sequence_dim=3"):
            embeddings.apply_rotary_emb(x, tables, sequence_dim=3)
        with pytest.raises(RuntimeError):  # tables narrower than a head
            embeddings.apply_rotary_emb(x, tuple(table[:, :4] for table in tables))
        with pytest.raises(TypeError):
            embeddings.apply_rotary_emb(x, tables, True, -1, 2, 4)


@pytest.mark.parametrize("model, error", [(torch.nn.Linear(2, 2), ValueError), (3, TypeError)])
def test_what_is_refused(model, error):
    with pytest.raises(error, match="model: expected"):
        patch(model)
