"""Tests of other projects, each in its own file at a commit, with our functions in the place of theirs."""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import ropelab
from ropelab.bench import packages
from ropelab.bench.peers import rotary_embedding_torch

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_backend")]


def module_of(repository: str, commit: str, path: str, **imports: SimpleNamespace) -> ModuleType:
    """The module of a file of tests, for the CPU.

    Args:
        imports: what the file imports, with "__" for each dot; "" for a dot at the start.
    """
    file = packages.file_at(repository, commit, path)
    module = ModuleType(f"{__name__}.{file.stem}")
    module.__package__ = "others"
    modules = {name.replace("__", "."): found for name, found in imports.items()}
    with mock.patch.dict(sys.modules, modules):
        exec(compile(file.read_text().replace('"cuda"', '"cpu"'), file, "exec"), vars(module))
    return module


def run(test, *instance, **chosen) -> int:
    """Call a test with the arguments of each of its cases that have the chosen ones; the number of cases."""
    axes = []
    for mark in (mark for mark in test.pytestmark if mark.name == "parametrize"):
        names, values = mark.args
        names = [name.strip() for name in names.split(",")]
        axes.append([dict(zip(names, x if len(names) > 1 else (x,), strict=True)) for x in values])
    cases = [{name: x for part in case for name, x in part.items()} for case in itertools.product(*axes)]
    cases = [case for case in cases if chosen.items() <= case.items()]
    for case in cases:
        test(*instance, **case)
    return len(cases)


# -------------------------------------------------------------------- xformers: padded caches, scaling, groups of heads


def from_seqlens(q_seqlen, kv_padding, kv_seqlen):
    return SimpleNamespace(q=q_seqlen, padding=kv_padding, kv=kv_seqlen)


def rope_padded(
    xq, xk, xv, cache_k, cache_v, bias, *, linear_scale=1.0, use_dynamic_scaling=False, adjacents=True,
    internal_dtype="", first_seqpos=None, seqpos=None,
):  # fmt: skip
    """xformers' function over `rope_and_cache`: the caches are one page, in which each sequence has its padded part."""
    places = [torch.arange(length - new, length) for new, length in zip(bias.q, bias.kv, strict=True)]
    slots = torch.cat([place + i * bias.padding for i, place in enumerate(places)])
    if seqpos is None:
        firsts = [0] * len(places) if first_seqpos is None else first_seqpos.tolist()
        seqpos = torch.cat([place + first for place, first in zip(places, firsts, strict=True)])
    scaling = {"rope_type": "linear", "factor": linear_scale}
    if use_dynamic_scaling:
        scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                   "original_max_position_embeddings": 8192}  # fmt: skip
    config = {"head_dim": xq.shape[-1], "rope_theta": 1e4, "max_position_embeddings": 2**17, "rope_scaling": scaling}
    tables = ropelab.rope_from_config(config).tables(
        int(seqpos.max()) + 1, dtype=torch.float64 if internal_dtype == "f64" else torch.float32
    )
    q, k, v = (x[0].flatten(1, -2) for x in (xq, xk, xv))
    layout = "interleaved" if adjacents else "split_half"
    caches = (cache.flatten(2, -2) for cache in (cache_k, cache_v))
    out = ropelab.rope_and_cache(q, k, v, *caches, slots, cos=tables[0], sin=tables[1], layout=layout, positions=seqpos)
    return out.view(xq.shape)


@pytest.fixture(scope="module")
def xformers():
    return module_of(
        "facebookresearch/xformers", "ca6d2aa0d43241fc8a8dcd872debc2406160160d", "tests/test_rope_padded.py",
        xformers__ops=SimpleNamespace(rope_padded=rope_padded),
        xformers__ops__fmha__attn_bias=SimpleNamespace(
            BlockDiagonalCausalWithOffsetPaddedKeysMask=SimpleNamespace(from_seqlens=from_seqlens)
        ),
        others__utils=SimpleNamespace(assert_allclose=torch.testing.assert_close),
    )  # fmt: skip


@pytest.mark.parametrize("adjacents", [True, False])
def test_rotation_scaling_and_padded_caches_of_xformers(xformers, adjacents):
    """The heads of 4,098 features and the caches of 18,300 places per sequence are left out, for their memory."""
    assert run(xformers.test_consistency, adjacents=adjacents, dim=100, padding=87) == 36


def test_prefill_of_xformers(xformers):
    assert run(xformers.test_rope_prefill, seqlen=512) == 1
    xformers.test_rope_seqpos()


# ------------------------------------------------------------------------------------------- rotary-embedding-torch


def apply_rotary_emb(freqs, t):
    """The function of rotary-embedding-torch: an angle for each feature, in adjacent pairs."""
    tables = {"cos": freqs[:, ::2].cos(), "sin": freqs[:, ::2].sin()}
    return ropelab.apply_rope(t[None, :, None], **tables, layout="interleaved")[0, :, 0]


def test_the_tests_of_rotary_embedding_torch():
    package = SimpleNamespace(
        RotaryEmbedding=rotary_embedding_torch.module("0.9.1").RotaryEmbedding, apply_rotary_emb=apply_rotary_emb
    )
    commit = "ceb29d6750f575f1cad14babe6a71664a599aad7"
    found = module_of("lucidrains/rotary-embedding-torch", commit, "tests/test_rope.py", rotary_embedding_torch=package)
    cases = found.TestSimpleRopeApply
    cases.test_apply_rotation.pytestmark += cases.pytestmark
    assert run(cases.test_apply_rotation, cases()) == 112
