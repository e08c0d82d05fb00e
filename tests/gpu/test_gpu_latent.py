"""The heads of multi-head latent attention on a GPU: against torch in bits, and our adapter against Megatron-LM."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

import ropelab
from ropelab.bench import latent_attention
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.peers import megatron
from ropelab.interop import megatron as interop
from ropelab.kernels import Rotation, latent_triton
from ropelab.kernels.run import run
from ropelab.kernels.tensors import LatentGradients
from ropelab.kernels.tiles import Tile
from ropelab.layout import pairing

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("sizes", [(128, 128, 64, 128), (5, 24, 10, 40), (17, 0, 6, 3)])
@pytest.mark.parametrize("seq_format", ["bshd", "sbhd", "bhsd"])
def test_the_kernels_have_the_bits_of_torch(sizes, seq_format):
    heads, nope_dim, rotary_dim, value_dim = sizes
    for dtype, (layout, out_layout) in itertools.product(DTYPES, itertools.product(pairing.LAYOUTS, repeat=2)):
        found = []
        for backend in ropelab.kernels.backends.BACKENDS:
            torch.manual_seed(0)

            def draw(heads, features, dtype=dtype):
                shape = {"b": 2, "s": 33, "h": heads, "d": features}
                return torch.randn([shape[axis] for axis in seq_format], device="cuda", dtype=dtype).requires_grad_()

            q, kv, k_pe = draw(heads, nope_dim + rotary_dim), draw(heads, nope_dim + value_dim), draw(1, rotary_dim)
            cos, sin = ropelab.rotary_table(100, rotary_dim, device="cuda")
            positions = torch.randint(-99, 100, (2, 33), device="cuda")
            positions[1, 3] = ropelab.NO_POSITION
            where = {"cos": cos, "sin": sin, "positions": positions, "seq_format": seq_format}
            with ropelab.use_backend(backend):
                ys = ropelab.assemble_mla(
                    q.clone(), kv, k_pe, layout=layout, out_layout=out_layout, inplace=True, **where
                )
                found.append([*ys, *torch.autograd.grad(ys, (q, kv, k_pe), [torch.randn_like(y) for y in ys])])
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_the_bits_do_not_depend_on_the_tile_and_the_batch():
    key_grad, value_grad = (torch.randn(3, 64, 40, d, device="cuda", dtype=torch.bfloat16) for d in (192, 128))
    cos, sin = ropelab.rotary_table(64, 64, device="cuda")
    rotation = Rotation(64, 128, out_interleaved=True, transpose=True)
    found = []
    for tile in (None, Tile(1, 4, 2), Tile(4, 8, 4), Tile(2, 2, 1), Tile(8, 1, 8, "tokens")):
        grads = [key_grad.new_full((3, 64, *size), torch.nan) for size in ((40, 256), (1, 64))]
        run(latent_triton.plan_backward, LatentGradients(key_grad, value_grad, *grads, cos, sin, None), rotation, tile)
        found.append(grads)
    alone = [key_grad.new_full((1, 64, *size), torch.nan) for size in ((40, 256), (1, 64))]
    t = LatentGradients(key_grad[1:2], value_grad[1:2], *alone, cos, sin, None)
    run(latent_triton.plan_backward, t, rotation)
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True))
    assert all(torch.equal(x, y[1:2]) for x, y in zip(alone, found[0], strict=True))


def test_the_tail_in_place_is_the_tail_of_a_new_query():
    """Many heads and large programs: a thread that wrote before another had read would show."""
    q = torch.randn(2048, 128, 192, device="cuda", dtype=torch.bfloat16)
    cos, sin = ropelab.rotary_table(2048, 64, device="cuda")
    where = {"cos": cos, "sin": sin, "layout": "interleaved", "out_layout": "split_half", "seq_format": "thd"}
    expected = ropelab.rotate_mla_query(q, 128, **where)
    for _ in range(20):
        assert torch.equal(ropelab.rotate_mla_query(q.clone(), 128, **where, inplace=True), expected)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("seq_format", "cp_size", "cp_rank"), [("sbhd", 1, 0), ("thd", 1, 0), ("thd", 2, 0), ("thd", 2, 1)]
)
def test_the_adapter_is_megatrons(seq_format, cp_size, cp_rank):
    """Each is within ROUNDINGS unit roundoffs of the definition, relative to the norm: the two differ by twice that."""
    theirs = megatron.kernels()
    case = latent_attention.Latent(seq_format, tokens=512)
    cu_seqlens = None if seq_format == "sbhd" else case.cu_seqlens("cuda") * cp_size
    cos, sin = (pairing.join(t, t, "split_half")[:, None, None].contiguous() for t in case.tables("cuda"))
    for part in latent_attention.PARTS[:2]:
        of_part = replace(case, part=part)
        inputs, cotangents = (make(case.normal("cuda")) for make in (of_part.inputs, of_part.cotangents))
        found = []
        for module in (theirs, interop):
            leaves = [x.clone().requires_grad_() for x in inputs]
            where = cu_seqlens, cp_rank, cp_size
            if part == "q":
                ys = [module.fused_apply_mla_rope_for_q(*leaves, cos, sin, 128, 64, *where)]
            else:
                ys = module.fused_apply_mla_rope_for_kv(*leaves, cos, sin, 64, 128, 128, *where)
            found.append([*ys, *torch.autograd.grad(ys, leaves, [g.clone() for g in cotangents])])
        for x, y in zip(*found, strict=True):
            error = latent_attention.ROUNDINGS * torch.finfo(x.dtype).eps / 2
            norm = y.float().norm(dim=-1) / (1 - error)
            assert ((x - y).float().norm(dim=-1) <= 2 * error * norm).all()


# ------------------------------------------------------------------------------------------- a value that is a view


def attention(name, q, key, value):
    """Causal attention of ``[B, S, H, D]`` with the kernel of this name; the test is skipped where it is not there."""
    if name == "FlashAttention 3":
        flash = pytest.importorskip("flash_attn_interface", reason="needs the package flash-attn-3 and a Hopper GPU")
        result = flash.flash_attn_func(q, key, value, causal=True)
        return result[0] if isinstance(result, tuple) else result
    q, key, value = (x.transpose(1, 2) for x in (q, key, value))
    usable, backend = {
        "efficient": (can_use_efficient_attention, SDPBackend.EFFICIENT_ATTENTION),
        "cuDNN": (can_use_cudnn_attention, SDPBackend.CUDNN_ATTENTION),
    }[name]
    if not usable(SDPAParams(q, key, value, None, 0.0, True, False)):
        pytest.skip(f"needs a GPU and a torch whose {name} attention has heads of 192 and 128 features, as an H200")
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2)


def copies(names):
    """The names of copies of torch and of any kernel of Inductor."""
    return [name for name in names if re.search("copy|memcpy|triton_", name, re.IGNORECASE)]


def latent(tokens=512, heads=16):
    """q, kv and k_pe of DeepSeek-V3's sizes, and the further arguments of `ropelab.assemble_mla_kv`."""
    sizes = (heads, 192), (heads, 256), (1, 64)
    tensors = [torch.randn(2, tokens, *size, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]
    cos, sin = ropelab.rotary_table(tokens, 64, device="cuda")
    return tensors, {"cos": cos, "sin": sin, "layout": "interleaved", "out_layout": "split_half"}


@pytest.mark.parametrize("name", ["efficient", "cuDNN", "FlashAttention 3"])
@pytest.mark.parametrize("direction", ["inference", "forward", "backward"])
def test_attention_reads_the_view_without_a_copy(name, direction):
    """The trace of assembly and attention is that of a new value, and a copy of the view would show in it."""
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own
    (q, kv, k_pe), where = latent()
    grad = torch.randn(2, 512, 16, 128, device="cuda", dtype=torch.bfloat16)

    def attend(copy_value, contiguous=False):
        key, value = ropelab.assemble_mla_kv(kv, k_pe, 128, **where, copy_value=copy_value)
        return attention(name, q, key, value.contiguous() if contiguous else value)

    with torch.set_grad_enabled(direction != "inference"):
        view, new = attend(False), attend(True)
        assert torch.equal(view, new)
        if direction == "backward":
            results, expected = (
                kernel_names(lambda y=y: torch.autograd.grad(y, (q, kv, k_pe), grad, retain_graph=True))
                for y in (view, new)
            )
        else:
            results, expected = (kernel_names(lambda c=c: attend(c)) for c in (False, True))
            assert copies(kernel_names(lambda: attend(False, contiguous=True)))
            assert not copies(results), results
    assert results == expected


def test_a_compiled_step_reads_the_view_without_a_copy():
    torch.use_deterministic_algorithms(False)
    inputs, where = latent()

    def step(q, kv, k_pe):
        heads = q, *ropelab.assemble_mla_kv(kv, k_pe, 128, **where, copy_value=False)
        return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads), is_causal=True)

    compiled = torch.compile(step, fullgraph=True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert torch.equal(compiled(*inputs), step(*inputs))
        names = kernel_names(lambda: compiled(*inputs))
    assert sum("assemble" in name for name in names) == 1 and not copies(names), names


def test_a_graph_replays_the_view_and_its_gradient():
    (_, kv, k_pe), where = latent(tokens=64)
    key_grad, value_grad = torch.randn_like(kv[..., :192]), torch.randn_like(kv[..., 128:])

    def step():
        made = ropelab.assemble_mla_kv(kv, k_pe, 128, **where, copy_value=False)
        return [x.detach() for x in (*made, *torch.autograd.grad(made, (kv, k_pe), (key_grad, value_grad)))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for changed in (kv.detach(), key_grad, value_grad):
        changed.normal_()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True))


def test_a_view_saves_the_memory_of_the_value():
    (_, kv, k_pe), where = latent()
    found = [
        peak_bytes(lambda c=c: ropelab.assemble_mla_kv(kv, k_pe, 128, **where, copy_value=c)) for c in (True, False)
    ]
    assert found[0] - found[1] == kv.nbytes // 2
