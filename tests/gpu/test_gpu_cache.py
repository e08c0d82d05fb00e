"""Made scales and cached keys on a GPU: in CUDA graphs, under torch.compile, without waiting, at large sizes."""

import pytest
import torch

import ropelab
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS

pytestmark = pytest.mark.gpu
E4M3 = FLOAT8_DTYPES[0]
TOKENS, PAGE, HEADS, DIM = 300, 16, 8, 128


def tensors(tokens: int = TOKENS, value_dim: int = DIM) -> dict:
    """The arguments of a pass with q and caches in 8-bit floats, whose scales the pass makes."""
    pages = 2 * -(-tokens // PAGE)
    q, k, v = (torch.randn(tokens, n, d, device="cuda", dtype=torch.bfloat16)
               for n, d in ((32, DIM), (HEADS, DIM), (HEADS, value_dim)))  # fmt: skip
    cos, sin = ropelab.rotary_table(4096, DIM, device="cuda")
    caches = [torch.zeros(pages, PAGE, HEADS, d, device="cuda").to(E4M3) for d in (DIM, value_dim)]
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
    slots[::5] = -1
    scales = [torch.zeros(pages, PAGE, HEADS, device="cuda") for _ in caches]
    return {
        "q": q, "k": k, "v": v, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots, "cos": cos,
        "sin": sin, "positions": torch.randint(4096, (tokens,), device="cuda"), "q_out": q.to(E4M3),
        "q_scale_out": torch.zeros(tokens, 32, device="cuda"), "k_scale_cache": scales[0], "v_scale_cache": scales[1],
    }  # fmt: skip


WRITTEN = "key_cache", "value_cache", "q_out", "q_scale_out", "k_scale_cache", "v_scale_cache"


def cached(given: dict) -> dict:
    """The arguments of a call that turns the keys of `tensors` again."""
    found = {name: given[name] for name in ("key_cache", "k_scale_cache", "cos", "sin")}
    return found | {"slots": given["slot_mapping"], "deltas": torch.randint(-4000, 4000, (TOKENS,), device="cuda")}


def copied(given: dict) -> dict:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def assert_written(found: dict, right: dict, names=WRITTEN):
    for name in names:
        assert torch.equal(*(x[name].float() for x in (found, right))), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 37, TOKENS, 5000])
@pytest.mark.parametrize("value_dim", [DIM, 512])
def test_made_scales_have_the_bits_of_torch_operations(tokens, layout, value_dim):
    given = tensors(tokens, value_dim) | {"layout": layout}
    right = copied(given)
    ropelab.rope_and_cache(**given)
    with ropelab.use_backend("torch"):
        ropelab.rope_and_cache(**right)
    assert_written(given, right)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads, nope_dim", [(128, 512), (16, 512), (3, 40)])
@pytest.mark.parametrize("tokens", [1, 700])
def test_latent_attention_has_the_bits_of_torch_operations(tokens, layout, heads, nope_dim):
    found = []
    q, kv = (torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (heads * 192, 576))
    nope = torch.randn(tokens, heads, nope_dim, device="cuda", dtype=torch.bfloat16)
    cos, sin = ropelab.rotary_table(4096, 64, device="cuda")
    slots, positions = torch.randperm(2048, device="cuda")[:tokens], torch.arange(tokens, device="cuda")
    for backend in ("triton", "torch"):
        cache, scales = torch.zeros(128, 16, 576, device="cuda").to(E4M3), torch.zeros(128, 16, device="cuda")
        out, q_scales = nope.new_empty(tokens, heads, nope_dim + 64).to(E4M3), torch.zeros(tokens, heads, device="cuda")
        with ropelab.use_backend(backend):
            ropelab.mla_rope_and_cache(
                q.view(tokens, heads, 192)[..., 128:], kv[:, 512:], kv[:, :512], cache, slots, cos=cos, sin=sin,
                positions=positions, layout=layout, q_nope=nope, q_nope_out=out[..., :nope_dim],
                q_out=out[..., nope_dim:], q_scale_out=q_scales, kv_scale_cache=scales,
            )  # fmt: skip
        found.append((cache.float(), scales, out.float(), q_scales))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype, scales", [(torch.bfloat16, False), (E4M3, False), (E4M3, True), (FLOAT8_DTYPES[1], True)]
)
@pytest.mark.parametrize("heads, dim, rotary_slice", [(8, 128, None), (1, 576, (512, 576)), (3, 72, (0, 40))])
@pytest.mark.parametrize("count", [1, 5000])
def test_cached_keys_have_the_bits_of_torch_operations(count, heads, dim, rotary_slice, dtype, scales, layout):
    cache = torch.randn(700, 16, heads, dim, device="cuda").to(dtype)
    first, end = rotary_slice or (0, dim)
    cos, sin = ropelab.rotary_table(4096, end - first, device="cuda")
    slots = torch.randperm(700 * 16, device="cuda")[:count]
    deltas = torch.randint(-4095, 4096, (count,), device="cuda")
    made = torch.rand(700, 16, heads, device="cuda") + 0.1
    found = []
    for backend in ("triton", "torch"):
        x, s = cache.clone(), made.clone() if scales else None
        with ropelab.use_backend(backend):
            ropelab.rotate_cached_keys(
                x, slots, deltas, cos=cos, sin=sin, layout=layout, rotary_slice=rotary_slice, k_scale_cache=s
            )
        found.append((x.float(), made if s is None else s))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_captured_in_a_cuda_graph():
    """The replay reads new contents: slots, positions, deltas and inputs."""
    given = tensors()
    again, fresh = cached(given), tensors()
    step = lambda given, again: (ropelab.rope_and_cache(**given), ropelab.rotate_cached_keys(**again))  # noqa: E731
    step(given, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(given, again)
    for name in ("q", "k", "v", "slot_mapping", "positions"):
        given[name].copy_(fresh[name])
    again["deltas"].random_(-4000, 4000)
    for name in WRITTEN:
        given[name].zero_()
    right = copied(given)
    graph.replay()
    step(right, cached(right) | {"deltas": again["deltas"]})
    assert_written(given, right)


@pytest.mark.parametrize(
    "function, arguments", [(ropelab.rope_and_cache, tensors), (ropelab.rotate_cached_keys, cached)]
)
def test_compiled_in_one_graph(function, arguments):
    given = tensors() if arguments is tensors else cached(tensors())
    right = copied(given)
    torch.compile(function, fullgraph=True)(**given)
    function(**right)
    assert_written(given, right, [name for name in WRITTEN if name in given])


def test_no_call_waits_for_the_gpu():
    """Under this setting PyTorch raises at every synchronisation."""
    given = tensors()
    again = cached(given) | {"deltas": -5}
    torch.cuda.set_sync_debug_mode("error")
    try:
        ropelab.rope_and_cache(**given)
        ropelab.rotate_cached_keys(**again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
