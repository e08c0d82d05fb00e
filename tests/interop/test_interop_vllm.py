"""vLLM's operators for QK norm, rotation and cache, and for MLA: the adapters, and the real operators on a GPU."""

import pytest
import torch

import ropelab
from ropelab.bench import packages
from ropelab.interop.vllm import concat_and_cache_mla_rope_fused, fused_qknorm_rope_cache
from ropelab.kernels.float8 import FLOAT8_DTYPES
from tests.ops.test_paged_cache import POISON, assert_equal

E4M3 = FLOAT8_DTYPES[0]
FORMATS = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": FLOAT8_DTYPES[1]}
LIBRARY = "vllm/_C_stable_libtorch.abi3.so"


def norm_call(device="cpu", *, tokens=6, heads=(4, 2), head_dim=16, kind="auto", dtype=torch.float32, seed=0):
    """The arguments of `fused_qknorm_rope_cache` by name; half of the features rotate."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q_heads, k_heads = heads
    cache_dtype = dtype if kind == "auto" else FORMATS[kind]
    caches = [torch.full((tokens, 4, k_heads, head_dim), POISON, device=device).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(4 * tokens, generator=generator, device=device)[:tokens]
    slots[1::3] = -1
    cos, sin = (table.to(dtype) for table in ropelab.rotary_table(64, head_dim // 2, device=device))
    return {
        "q_out": draw(tokens, q_heads * head_dim), "k_out": draw(tokens, k_heads * head_dim),
        "v_out": draw(tokens, k_heads * head_dim), "qkv": draw(tokens, (q_heads + 2 * k_heads) * head_dim),
        "q_weight": draw(head_dim), "k_weight": draw(head_dim), "cos": cos, "sin": sin,
        "positions": torch.randint(64, (tokens,), generator=generator, device=device), "slot_mapping": slots,
        "k_cache": caches[0] if kind == "auto" else caches[0].view(torch.uint8),
        "v_cache": caches[1] if kind == "auto" else caches[1].view(torch.uint8),
        "head_dim": head_dim, "num_q_heads": q_heads, "num_kv_heads": k_heads, "rotary_pairs": head_dim // 4,
        "epsilon": 1e-6, "norm_weight_bias": 1.0, "kv_cache_dtype": kind,
        "k_scale": torch.tensor([0.05], device=device), "v_scale": torch.tensor([0.02], device=device),
    }  # fmt: skip


def latent_call(device="cpu", *, tokens=6, heads=4, kind="auto", is_neox=False, dtype=torch.float32, seed=0):
    """The arguments of `concat_and_cache_mla_rope_fused` by name, with the sizes of DeepSeek-V3's features."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    cache = torch.full((tokens, 4, 576), POISON, device=device).to(dtype if kind == "auto" else FORMATS[kind])
    slots = torch.randperm(4 * tokens, generator=generator, device=device)[:tokens]
    slots[1::3] = -1
    return {
        "positions": torch.randint(64, (tokens,), generator=generator, device=device),
        "q_pe": draw(tokens, heads, 192)[..., 128:], "k_pe": draw(tokens, 576)[:, 512:], "kv_c": draw(tokens, 512),
        "cos_sin_cache": torch.cat(ropelab.rotary_table(64, 64, device=device), -1).to(dtype), "is_neox": is_neox,
        "slot_mapping": slots, "kv_cache": cache if kind == "auto" else cache.view(torch.uint8), "kv_cache_dtype": kind,
        "kv_cache_scale": torch.tensor([0.05], device=device),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
def test_the_operator_with_a_norm_is_rope_and_cache(device, kind):
    call = norm_call(kind=kind)
    q, k, v = call["qkv"].unflatten(-1, (-1, 16)).split((4, 2, 2), dim=1)
    caches = [call[name].clone() for name in ("k_cache", "v_cache")]
    fp8 = [cache if kind == "auto" else cache.view(FORMATS[kind]) for cache in caches]
    scales = {} if kind == "auto" else {"k_scale": call["k_scale"], "v_scale": call["v_scale"]}
    k_out = torch.empty(6, 2, 16)
    expected = ropelab.rope_and_cache(
        q, k, v, *fp8, call["slot_mapping"], cos=call["cos"], sin=call["sin"], positions=call["positions"],
        q_weight=call["q_weight"], k_weight=call["k_weight"], weight_offset=1.0, k_out=k_out, **scales,
    )  # fmt: skip
    fused_qknorm_rope_cache(**call)
    assert_equal(call["q_out"], expected.flatten(1))
    assert_equal(call["k_out"], k_out.flatten(1))
    assert_equal(call["v_out"], v.flatten(1))
    assert_equal(call["k_cache"], caches[0])
    assert_equal(call["v_cache"], caches[1])


def test_outputs_that_nobody_needs_may_be_left_out(device):
    call, other = norm_call(), norm_call()
    fused_qknorm_rope_cache(**call)
    fused_qknorm_rope_cache(**other | {"k_out": None, "v_out": None})
    for name in ("q_out", "k_cache", "v_cache"):
        assert_equal(other[name], call[name])


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_operator_of_latent_attention(device, kind, is_neox):
    call = latent_call(kind=kind, is_neox=is_neox)
    cos, sin = call["cos_sin_cache"].chunk(2, -1)
    where = {"cos": cos, "sin": sin, "positions": call["positions"], "seq_format": "thd"}
    layout = "split_half" if is_neox else "interleaved"
    q, k = ropelab.apply_rope(call["q_pe"], call["k_pe"][:, None], layout=layout, **where)
    concat_and_cache_mla_rope_fused(**call)
    assert_equal(call["q_pe"], q)
    assert_equal(call["k_pe"], k[:, 0])
    if kind == "auto":
        slot = int(call["slot_mapping"][0])
        assert_equal(call["kv_cache"].flatten(0, 1)[slot], torch.cat((call["kv_c"][0], k[0, 0])))


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_without_a_pair_nothing_rotates(device, kind):
    call = norm_call(kind=kind)
    call |= {"rotary_pairs": 0, "cos": call["cos"][:, :0], "sin": call["sin"][:, :0]}
    q, k, _ = call["qkv"].unflatten(-1, (-1, 16)).double().split((4, 2, 2), dim=1)
    fused_qknorm_rope_cache(**call)
    for name, x in (("q", q), ("k", k)):
        expected = torch.nn.functional.rms_norm(x, (16,), 1 + call[f"{name}_weight"].double(), 1e-6)
        torch.testing.assert_close(call[f"{name}_out"].unflatten(-1, (-1, 16)).double(), expected, rtol=1e-6, atol=1e-6)


def test_positions_may_be_longer_than_the_tokens(device):
    call, other = norm_call(), norm_call()
    fused_qknorm_rope_cache(**call)
    fused_qknorm_rope_cache(**other | {"positions": torch.nn.functional.pad(call["positions"], (0, 3), value=99)})
    assert_equal(other["q_out"], call["q_out"])


# ---------------------------------------------------------------------------------------------- the real operators


def operator(name: str):
    """The operator of vLLM 0.33.0, out of the library of its wheel."""
    _, directory = packages.locate("vllm", "0.33.0")
    try:
        torch.ops.load_library(directory / LIBRARY)
    except OSError as error:
        raise packages.NotInstalled(f"vLLM 0.33.0 cannot be loaded here: {error}") from error
    (found,) = (getattr(library, name) for library in (torch.ops._C, torch.ops._C_cache_ops) if hasattr(library, name))
    return found


def assert_close(actual, expected, roundings):
    """Every head agrees within ``roundings`` unit roundoffs of its dtype, relative to its largest feature."""
    unit = torch.finfo(actual.dtype).eps / 2
    actual, expected = actual.double(), expected.double()
    limit = roundings * unit * expected.abs().amax(-1, keepdim=True)
    assert ((actual - expected).abs() <= limit).all(), ((actual - expected).abs() / limit).max()


@pytest.mark.peers
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_the_real_operator_with_a_norm(kind, tokens):
    """vLLM rounds the normalized heads before the rotation, so both differ by a few roundings; v is the same."""
    theirs = operator("fused_qknorm_rope_cache")
    sizes = {"tokens": tokens, "heads": (32, 8), "head_dim": 128, "kind": kind, "dtype": torch.bfloat16}
    ours_call, their_call = norm_call("cuda", **sizes), norm_call("cuda", **sizes)
    fused_qknorm_rope_cache(**ours_call)
    theirs(*their_call.values())
    for name in ("q_out", "k_out"):
        found, expected = (call[name].view(tokens, -1, 128) for call in (ours_call, their_call))
        assert_close(found, expected, 4)
    assert_equal(ours_call["v_out"], their_call["v_out"])
    assert_equal(ours_call["v_cache"], their_call["v_cache"])
    found, expected = (
        call["k_cache"] if kind == "auto" else call["k_cache"].view(E4M3) for call in (ours_call, their_call)
    )
    assert_close(found, expected, 4)
    other = torch.ones(4 * tokens, dtype=torch.bool, device="cuda")
    other[ours_call["slot_mapping"][ours_call["slot_mapping"] >= 0]] = False
    assert (found.flatten(0, 1)[other].float() == POISON).all()


@pytest.mark.peers
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("is_neox", [False, True])
def test_the_real_operator_of_latent_attention(kind, is_neox):
    """Tokens with a slot agree; vLLM computes in bfloat16, and does not rotate q_pe and k_pe of other tokens."""
    theirs = operator("concat_and_cache_mla_rope_fused")
    sizes = {"tokens": 50, "heads": 16, "kind": kind, "is_neox": is_neox, "dtype": torch.bfloat16}
    ours_call, their_call = latent_call("cuda", **sizes), latent_call("cuda", **sizes)
    concat_and_cache_mla_rope_fused(**ours_call)
    theirs(*their_call.values())
    live = ours_call["slot_mapping"] >= 0
    for name in ("q_pe", "k_pe"):
        assert_close(ours_call[name][live], their_call[name][live], 6)
    found, expected = (
        call["kv_cache"] if kind == "auto" else call["kv_cache"].view(E4M3) for call in (ours_call, their_call)
    )
    assert_equal(found[..., :512], expected[..., :512])
    assert_close(found[..., 512:], expected[..., 512:], 6)
