"""The heads of multi-head latent attention on a GPU: against torch in bits, and our adapter against Megatron-LM."""

import itertools

import pytest
import torch

import ropelab
from ropelab.bench import latent_attention, packages
from ropelab.bench.peers import megatron
from ropelab.interop import megatron as interop
from ropelab.kernels import Rotation, latent_triton
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
        latent_triton.backward(LatentGradients(key_grad, value_grad, *grads, cos, sin, None), rotation, tile=tile)
        found.append(grads)
    alone = [key_grad.new_full((1, 64, *size), torch.nan) for size in ((40, 256), (1, 64))]
    latent_triton.backward(LatentGradients(key_grad[1:2], value_grad[1:2], *alone, cos, sin, None), rotation)
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


@pytest.mark.parametrize(
    ("seq_format", "cp_size", "cp_rank"), [("sbhd", 1, 0), ("thd", 1, 0), ("thd", 2, 0), ("thd", 2, 1)]
)
def test_the_adapter_is_megatrons(seq_format, cp_size, cp_rank):
    """Each is within ROUNDINGS unit roundoffs of the definition, relative to the norm: the two differ by twice that."""
    try:
        theirs = megatron.kernels()
    except packages.NotInstalled as error:
        pytest.skip(f"make peers: {error}")
    case = latent_attention.Latent(seq_format, tokens=512)
    cu_seqlens = None if seq_format == "sbhd" else case.cu_seqlens("cuda") * cp_size
    cos, sin = (pairing.join(t, t, "split_half")[:, None, None].contiguous() for t in case.tables("cuda"))
    for part in latent_attention.PARTS[:2]:
        inputs, cotangents = (make(part, case.normal("cuda")) for make in (case.inputs, case.cotangents))
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
