"""Megatron-LM's functions over our kernels: beside its own code in torch and its Triton kernels, and the patch."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from ropelab.bench.peers import megatron as peer
from ropelab.interop import megatron
from ropelab.kernels import INTERPRETED
from ropelab.layout.pairing import join


@pytest.fixture(scope="module")
def utils():
    """Megatron-LM's rotation in torch operations."""
    return peer.rope_utils()


@pytest.fixture(scope="module")
def kernels():
    """Megatron-LM's Triton kernels, interpreted, without tuning."""
    module = peer.kernels()
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter; test_gpu_latent compares on a GPU")
    for name in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"):
        kernel = getattr(module, name)
        kernel.configs = kernel.configs[:1]
    return module


def group(size=1, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def config(**changes):
    names = {"apply_rope_fusion": False, "rotary_interleaved": False, "multi_latent_attention": False}
    return SimpleNamespace(**(names | {"mrope_section": None} | changes))


def angles(rows, width, batch=1, layout="split_half"):
    """Angles of each token and pair, both members alike, in float64 so that no side rounds cosines first."""
    of_pairs = torch.rand(rows, batch, 1, width // 2, dtype=torch.float64) * 20
    return join(of_pairs, of_pairs, layout)


def agree(ours, theirs, *leaves):
    """Results and gradients are the same, up to the rounding of float64."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(ours)
    grads = [torch.autograd.grad(y, leaves, cotangent) for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("mscale", [1.0, 1.3])
@pytest.mark.parametrize("kind", ["halves", "interleaved", "mla", "mrope", "partial"])
def test_dense_tokens(kind, mscale, utils):
    layout = "interleaved" if kind == "interleaved" else "split_half"
    t = torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    freqs = angles(5, 6 if kind == "partial" else 8, batch=2 if kind == "mrope" else 1, layout=layout)
    given = config(rotary_interleaved=kind == "interleaved", multi_latent_attention=kind == "mla")
    ours, theirs = (f(t, freqs, given, mscale=mscale, cp_group=group())
                    for f in (megatron.apply_rotary_pos_emb, utils.apply_rotary_pos_emb))  # fmt: skip
    agree(ours, theirs, t)
    if kind != "mla":
        fused = megatron.fused_apply_rotary_pos_emb(t, freqs, interleaved=kind == "interleaved", mscale=mscale)
        assert torch.equal(fused, ours)


@pytest.mark.peers
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("rows", ["of the longest sequence", "of every token"])
@pytest.mark.parametrize("mla", [False, True])
def test_packed_tokens(rows, cp_size, cp_rank, mla, utils):
    cu_seqlens = torch.tensor([0, 4, 12, 16], dtype=torch.int32)
    t = torch.randn(16 // cp_size, 3, 8, dtype=torch.float64, requires_grad=True)
    freqs = angles(8 if rows == "of the longest sequence" else 16, 8)
    where = config(multi_latent_attention=mla), cu_seqlens, 1.3, group(cp_size, cp_rank)
    ours, theirs = (f(t, freqs, *where) for f in (megatron.apply_rotary_pos_emb, utils.apply_rotary_pos_emb))
    agree(ours, theirs, t)
    if not mla and len(freqs) == 8:
        fused = megatron.fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_size, cp_rank, mscale=1.3)
        assert torch.equal(fused, ours)


def test_the_host_need_not_wait_for_the_sequences():
    """As on the main branch, more rows than ``max_seqlen`` mean that every token has a row."""
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    t, freqs = torch.randn(12, 3, 8), angles(12, 8)
    own = megatron.apply_rotary_pos_emb(t, freqs, config(), cu_seqlens, cp_group=group(), max_seqlen=8)
    expected = megatron.apply_rotary_pos_emb(t[:, None], freqs, config())[:, 0]
    assert torch.equal(own, expected)


def test_the_inverse_and_adjacent_results_of_the_main_branch():
    t, freqs = torch.randn(5, 2, 3, 8, dtype=torch.float64), angles(5, 8)
    turned = megatron.apply_rotary_pos_emb(t, freqs, config())
    back = megatron.apply_rotary_pos_emb(turned, freqs, config(), inverse=True)
    torch.testing.assert_close(back, t)
    halves = megatron.apply_rotary_pos_emb(t, freqs, config(), mla_rotary_interleaved=True)
    adjacent = megatron.apply_rotary_pos_emb(
        t, freqs, config(), mla_rotary_interleaved=True, mla_output_remove_interleaving=True
    )
    assert torch.equal(adjacent, join(*halves.chunk(2, -1), "interleaved"))


# ------------------------------------------------------------------------------------------ multi-head latent attention


@pytest.mark.peers
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(None, 0), (1, 0), (2, 1)])
def test_the_functions_for_latent_attention(cp_size, cp_rank, kernels):
    """The functions agree with Megatron-LM's own kernels: dense, packed, and on one rank of two."""
    heads, nope_dim, emb_dim, v_dim = 3, 4, 8, 2
    tokens = (4, 2) if cp_size is None else (8 // cp_size,)
    cu_seqlens = None if cp_size is None else torch.tensor([0, 4, 8], dtype=torch.int32)
    freqs = angles(8, emb_dim).float()
    cos, sin = freqs.cos(), freqs.sin()
    where = () if cp_size is None else (cu_seqlens, cp_rank, cp_size)
    q, kv, k_pe = (torch.randn(*tokens, *size) for size in ((heads, 12), (heads, 6), (1, 8)))
    found = []
    for module in (megatron, kernels):
        leaves = [x.clone().requires_grad_() for x in (q, kv, k_pe)]
        query = module.fused_apply_mla_rope_for_q(leaves[0], cos, sin, nope_dim, emb_dim, *where)
        assert query.data_ptr() == leaves[0].data_ptr()
        key, value = module.fused_apply_mla_rope_for_kv(*leaves[1:], cos, sin, emb_dim, nope_dim, v_dim, *where)
        torch.manual_seed(0)
        cotangents = [torch.randn_like(y) for y in (query, key, value)]
        found.append([query, key, value, *torch.autograd.grad((query, key, value), leaves, cotangents)])
        assert key.is_contiguous() and value.is_contiguous()
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)  # both compute in float32


def test_the_arguments_of_the_main_branch():
    t = torch.randn(6, 2, 3, 12)
    freqs = angles(6, 8).float()
    cos, sin = freqs.cos(), freqs.sin()
    kept = t.clone()
    halves = megatron.fused_mla_rope_out_of_place(t, cos, sin, 4, 8)
    assert torch.equal(t, kept)
    adjacent = megatron.fused_mla_rope_out_of_place(t, cos, sin, 4, 8, remove_interleaving=True)
    assert torch.equal(adjacent[..., 4:], join(*halves[..., 4:].chunk(2, -1), "interleaved"))
    back = megatron.fused_mla_rope_inplace(adjacent.clone(), cos, sin, 4, 8, inverse=True, remove_interleaving=True)
    torch.testing.assert_close(back, t, rtol=1e-5, atol=1e-5)
    order, cu_seqlens = torch.tensor([3, 1, 0, 5, 2, 4]), torch.tensor([0, 6], dtype=torch.int32)
    placed = megatron.fused_mla_rope_inplace(t[order, 0].clone(), cos, sin, 4, 8, cu_seqlens, position_ids=order)
    assert torch.equal(placed, halves[order, 0])


@pytest.mark.parametrize("name", ["rotary_interleaved", "multi_latent_attention", "apply_rope_fusion"])
def test_a_flag_of_the_configuration_is_a_bool(name):
    t, freqs, wrong = torch.randn(8, 3, 12), torch.rand(8, 1, 1, 12), config(**{name: "False"})
    with pytest.raises(TypeError, match=f"config.{name}: expected a bool, got str 'False'"):
        megatron.apply_rotary_pos_emb(t, freqs, wrong, torch.tensor([0, 8]), cp_group=group())


@pytest.mark.parametrize("width", [12, 8])
def test_results_are_contiguous_as_megatrons(width):
    t, freqs = torch.randn(2, 8, 3, 12).transpose(0, 1), torch.rand(8, 1, 1, width)
    assert megatron.fused_apply_rotary_pos_emb(t, freqs).is_contiguous()
    packed, cu_seqlens = torch.randn(3, 8, 12).transpose(0, 1), torch.tensor([0, 8])
    assert megatron.fused_apply_rotary_pos_emb_thd(packed, cu_seqlens, freqs).is_contiguous()


# ------------------------------------------------------------------------------------------------------------- patch


@pytest.fixture
def package(monkeypatch, utils):
    """Megatron-LM's modules by their names, and a module that has imported two functions."""
    mla = ModuleType(megatron._MLA)
    for name in megatron._OF_MLA[:2]:
        setattr(mla, name, mock.create_autospec(getattr(megatron, name)))
    caller = ModuleType("caller_of_megatron")
    caller.apply_rotary_pos_emb = utils.apply_rotary_pos_emb
    caller.fused_apply_mla_rope_for_q = mla.fused_apply_mla_rope_for_q
    modules = {megatron._UTILS: utils, megatron._MLA: mla, caller.__name__: caller}
    for name in (*modules, "megatron.core.parallel_state"):
        for end in (i for i, letter in enumerate(name) if letter == "."):
            modules.setdefault(name[:end], ModuleType(name[:end]))
    with mock.patch.dict(sys.modules, modules):
        yield caller


@pytest.mark.peers
def test_the_patch_reaches_every_module_and_goes_away(package, utils):
    originals = utils.apply_rotary_pos_emb, package.fused_apply_mla_rope_for_q
    t, freqs = torch.randn(5, 2, 3, 8, dtype=torch.float64), angles(5, 8)
    expected = utils.apply_rotary_pos_emb(t, freqs, config(), cp_group=group())
    with megatron.patch() as patched:
        assert f"{utils.__name__}.fused_apply_rotary_pos_emb_thd" in patched.functions
        assert package.apply_rotary_pos_emb is not originals[0] and utils.fused_apply_rotary_pos_emb is not None
        found = package.apply_rotary_pos_emb(t, freqs, config(apply_rope_fusion=True), cp_group=group())
        torch.testing.assert_close(found, expected)
        q, cos = torch.randn(5, 2, 3, 12), torch.ones(5, 1, 1, 8)
        assert package.fused_apply_mla_rope_for_q(q, cos, 0 * cos, 4, 8) is q
        again = megatron.patch()
        assert not [name for name in again.functions if "apply_rotary_pos_emb" in name and "fused" not in name]
        again.undo()
    assert (package.apply_rotary_pos_emb, package.fused_apply_mla_rope_for_q) == originals
    assert utils.fused_apply_rotary_pos_emb is None


@pytest.mark.peers
def test_a_function_with_other_arguments_is_left_alone(package, utils, monkeypatch):
    monkeypatch.setattr(utils, "apply_rotary_pos_emb", lambda t, freqs, something_new: t)
    with pytest.raises(ValueError, match=r"rope_utils\.apply_rotary_pos_emb: expected arguments among"):
        megatron.patch()
    assert utils.fused_apply_rotary_pos_emb is None
