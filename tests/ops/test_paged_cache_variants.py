"""The variants of `rope_and_cache`: a norm across heads or after the rotation, no tables, features of q apart."""

import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import to_bshd
from tests.ops.test_paged_cache import POISON, assert_equal, example, latent_example, quantized

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def weights_across(call, dtype=torch.float32):
    """Weights for a norm across heads, beside the other options of a call."""
    found = {}
    for name, x in (("q", call.q), ("k", call.k)):
        features = to_bshd(x, call.options["seq_format"]).shape[2] * x.shape[-1]
        found[f"{name}_weight"] = torch.randn(features, dtype=dtype).to(x.device)
    call.options |= found


def normalized(x, weight, eps, offset=0.0):
    """The norm in float64: over a head, or over all heads of a token if the weight has the features of all heads."""
    x = x.double()
    rows = x if weight.numel() == x.shape[-1] else x.flatten(-2)
    rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    return rows.view(x.shape)


def right(call):
    """q and k of a call in ``thd`` with a norm, in float64."""
    o, found = call.options, []
    where = {name: o[name].cpu() for name in ("cos", "sin", "positions")} | {"seq_format": "thd", "layout": o["layout"]}
    where["rotary_slice"] = o.get("rotary_slice")
    for x, name in ((call.q, "q_weight"), (call.k, "k_weight")):
        x, weight = x.double().cpu(), o[name].cpu()
        norm = (weight, o.get("eps", 1e-6), o.get("weight_offset", 0.0))
        if o.get("norm_first", True):
            found.append(reference.rotate(normalized(x, *norm), **where))
        else:
            found.append(normalized(reference.rotate(x, **where), *norm))
    return found


def assert_close(found, expected, features):
    """Allow the roundings of a sum of ``features`` squares and of the rotation, relative to the largest element."""
    limit = (features + 10) * torch.finfo(torch.float32).eps * expected.abs().amax()
    assert ((found.double().cpu() - expected).abs() <= limit).all()


@layouts
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 16, 16, 0), (6, 2, 20, 8, 6), (2, 7, 24, 24, 0)])
def test_every_norm_is_the_norm_of_the_definition(device, shape, across, norm_first, layout):
    q_heads, k_heads, head_dim, rotary_dim, first = shape
    call = example(device, heads=(q_heads, k_heads), head_dim=head_dim, rotary_dim=rotary_dim, norm=True, layout=layout)
    if across:
        weights_across(call)
    call.options |= {"norm_first": norm_first, "weight_offset": 1.0, "rotary_slice": (first, first + rotary_dim)}
    call.slot_mapping = torch.arange(7, device=call.q.device)
    q, k = right(call)
    features = max(q_heads, k_heads) * head_dim
    assert_close(call(), q, features)
    assert_close(call.key_cache.flatten(0, 1)[:7], k, features)
    assert_equal(call.value_cache.flatten(0, 1)[:7], call.v)
    assert (call.key_cache.flatten(0, 1)[7:] == POISON).all()


@pytest.mark.parametrize("seq_format, batch", [("thd", 1), ("bshd", 2), ("bhsd", 2)])
@pytest.mark.parametrize("across", [True, False])
def test_a_token_has_the_same_bits_in_any_batch(device, across, seq_format, batch):
    """A token alone, and the token among others, under every norm."""
    call = example(device, batch=batch, seq_format=seq_format, norm=True, heads=(6, 3))
    if across:
        weights_across(call)
    call.options["norm_first"] = not across
    q = to_bshd(call(), seq_format)
    one = example(device, tokens=1, norm=True, heads=(6, 3))
    one.q, one.k, one.v = (to_bshd(x, seq_format)[-1, 4:5] for x in (call.q, call.k, call.v))
    positions = call.options["positions"].view(batch, -1)[-1, 4:5]
    one.options = call.options | {"positions": positions, "seq_format": "thd"}
    assert_equal(one()[0], q[-1, 4])


@layouts
@pytest.mark.parametrize("nope_dim", [8, 40, 21])
@pytest.mark.parametrize("dtype", [None, *FLOAT8_DTYPES])
def test_features_of_q_apart(device, dtype, nope_dim, layout):
    """Rotated and other features of q from and to tensors of their own."""
    call = example(device, layout=layout, dtype=torch.float16)
    scale = None if dtype is None else torch.rand(5, device=call.q.device) + 0.01
    q_nope = torch.randn(7, 5, nope_dim, device=call.q.device).half()[..., :nope_dim]
    outs = [torch.empty(x.shape, dtype=dtype or torch.float16, device=x.device) for x in (call.q, q_nope)]
    q, _, caches = call.separately()
    call(q_nope=q_nope, q_out=outs[0], q_nope_out=outs[1], q_scale=scale)
    for found, x in zip(outs, (q, q_nope), strict=True):
        assert_equal(found.cpu(), x.cpu() if dtype is None else quantized(x, dtype, scale))
    assert_equal(call.key_cache, caches[0])


def test_latent_attention_with_all_features_of_q(device):
    """q_pe and q_nope of one tensor go to one tensor in 8-bit floats, rotated features behind the others."""
    (q_pe, k_pe, kv_c, cache, slots), options = latent_example(device)
    q_nope = torch.randn(6, 5, 40, device=q_pe.device)
    out = torch.empty(6, 5, 48, device=q_pe.device).to(FLOAT8_DTYPES[0])
    scale = torch.tensor([0.03], device=q_pe.device)
    q, _ = ropelab.apply_rope(q_pe, k_pe[:, None], seq_format="thd", **options)
    ropelab.mla_rope_and_cache(
        q_pe, k_pe, kv_c, cache, slots, q_nope=q_nope, q_nope_out=out[..., :40], q_out=out[..., 40:], q_scale=scale,
        **options,
    )  # fmt: skip
    assert_equal(out.cpu(), quantized(torch.cat((q_nope, q), -1), FLOAT8_DTYPES[0], scale))
