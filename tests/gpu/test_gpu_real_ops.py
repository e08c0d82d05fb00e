"""The real operators of vLLM, SGLang, FlashInfer and Megatron-LM on a GPU: against the definition, and against ours."""

from dataclasses import replace

import pytest
import torch

import ropelab
from ropelab.bench import latent_attention, packages, peers, studies
from ropelab.bench.cache_operations import LatentCache, NormAndCache
from ropelab.bench.operation import checked
from ropelab.bench.peers import torch_library
from ropelab.bench.qk_norm import QKNorm
from ropelab.bench.workloads import Workload
from ropelab.interop import sglang as interop
from ropelab.layout.pairing import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.peers]
layouts = pytest.mark.parametrize("layout", LAYOUTS)

WORK = Workload("small", 2, 33, 8, 2, 128, 128, first_position=1000)
PACKED = replace(WORK, batch=1, seq_len=40, seq_format="thd", lengths=(7, 32, 1), first_position=0)
CASES = (WORK, PACKED, replace(WORK, rotary_dim=64), replace(WORK, head_dim=80, rotary_dim=80, dtype=torch.float16))
PEERS = {peer.name: peer for peer in peers.PEERS}


@layouts
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seq_format} {case.rotary_dim} of {case.head_dim}")
@pytest.mark.parametrize("name", ["vllm", "sglang", "flashinfer", "quack", "quack in place"])
def test_rotations_agree_with_the_definition(name, case, layout):
    agrees(name, replace(case, layout=layout))


@layouts
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seq_format} {case.rotary_dim} of {case.head_dim}")
def test_gradients_of_quack_agree_with_the_definition(case, layout):
    agrees("quack", replace(case, layout=layout, direction="backward"))


@layouts
@pytest.mark.parametrize("rotary_dim", [64, 128])
@pytest.mark.parametrize("name", ["quack", "quack in place", "quack qkv", "quack kv"])
def test_rotations_of_views_of_qkv_agree_with_the_definition(name, rotary_dim, layout):
    agrees(name, replace(WORK, layout=layout, rotary_dim=rotary_dim, storage="qkv"))


def agrees(name: str, case: Workload) -> None:
    """The peer's results, or gradients, are those of the definition."""
    found, missing = peers.available((PEERS[name],))
    if missing:
        raise packages.NotInstalled(missing[name])
    (peer,) = found
    buffers = case.buffers()[0]
    try:
        rotate = peer.bind(case, buffers.cos, buffers.sin)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert peers.check(peer, rotate, case, buffers).status == "ok"


@layouts
@pytest.mark.parametrize("engine", torch_library.LIBRARIES)
def test_our_adapter_takes_the_same_arguments_and_agrees(engine, layout):
    rotate = torch_library.operators(engine).rotary_embedding
    cos, sin = ropelab.rotary_table(64, 96, device="cuda")
    cache, positions = torch.cat((cos, sin), -1).bfloat16(), torch.randint(64, (50,), device="cuda")
    q, k = (torch.randn(50, heads * 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    theirs, ours = ([x.clone() for x in (q, k)] for _ in range(2))
    arguments = (128, cache, layout == "split_half")
    rotate(positions, *theirs, *arguments)
    interop.apply_rope_with_cos_sin_cache_inplace(positions, *ours, *arguments)
    for x, y, before in zip(theirs, ours, (q, k), strict=True):
        heads = [t.view(50, -1, 128) for t in (x, y, before)]
        # Each of the two may err by three unit roundoffs of a pair: the products, the sums and the result.
        bound = 6 * torch.finfo(torch.bfloat16).eps / 2 * heads[2].double().norm(dim=-1)
        assert ((heads[0].double() - heads[1].double()).norm(dim=-1) <= bound).all()
        assert torch.equal(heads[0][..., 96:], heads[1][..., 96:])


@layouts
def test_norm_and_rotation_in_qkv(layout):
    case = QKNorm(replace(WORK, layout=layout), count=1)
    sets = case.sets("cuda")
    found = {name: one for name, one in case.contenders(sets, "cuda").items() if name in ("vllm", "sglang")}
    statuses = checked(case, sets, found, "cuda")
    if missing := {name: why for name, why in statuses.items() if why.startswith("not run")}:
        raise packages.NotInstalled(str(missing))
    assert set(statuses.values()) == {"ok"}, statuses


@pytest.mark.parametrize("kind", [NormAndCache, LatentCache])
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_writes_to_a_paged_cache(kind, tokens):
    case = kind(tokens)
    (call,) = case.sets("cuda", 1)
    assert case.check(case.ours("cuda"), call) == "ok"
    assert case.check(case.separate("cuda"), call) == "ok"
    assert case.check(case.vllm(torch_library.operators("vllm"), "cuda"), call) == "ok"


@pytest.mark.parametrize("kind", [NormAndCache, LatentCache])
def test_vllm_stores_no_token_without_a_slot(kind):
    case = kind(16)
    (call,) = case.sets("cuda", 1)
    run = case.vllm(torch_library.operators("vllm"), "cuda")
    slots = call["slots"]
    call["slots"] = slots.masked_fill(torch.arange(16, device="cuda") % 3 == 0, -1)
    before = {name: call[name].clone() for name in case.cached}
    run(call)
    for name in case.cached:
        changed = (call[name] != before[name]).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
        assert set(changed.tolist()) == set(call["slots"][call["slots"] >= 0].tolist())


@pytest.mark.parametrize("seq_format", latent_attention.FORMATS)
@pytest.mark.parametrize("part", latent_attention.PARTS)
def test_latent_attention_in_training(seq_format, part):
    case = latent_attention.Latent(seq_format, tokens=512, part=part)
    sets = case.sets("cuda")
    for contender in case.contenders(sets, "cuda").values():
        if isinstance(contender.run, str):
            raise packages.NotInstalled(contender.run)
        assert case.check(contender.run, sets[0]) == "ok"


@pytest.mark.parametrize("study", ["paged_cache", "latent_attention"])
def test_studies_run(study):
    frame = studies.STUDIES[study](smoke=True)
    assert not frame.status.str.startswith(("wrong", "failed")).any(), frame[["contender", "status"]]
    right = frame[frame.status == "ok"]
    assert (right.median_us > 0).all() and (right.fraction_of_copy > 0).all()
