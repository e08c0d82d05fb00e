"""Right implementations keep every law, whoever wrote them; and a failing run says what is wrong."""

import functools
import json

import numpy as np
import pytest
import torch

import ropelab
from ropelab.bench import packages
from ropelab.conformance import CONVENTIONS, LAWS, ConformanceError, Subject, pytest_laws, verify
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.law import Comparison
from ropelab.conformance.laws.robustness import _beyond_int32
from ropelab.conformance.report import text
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import hold
from ropelab.conformance.where import pattern
from ropelab.interop import megatron
from ropelab.kernels import INTERPRETED
from ropelab.study.faults import correct
from tests.conftest import HAS_GPU
from tests.support import not_interpreted

SLOW = ("compile", "large_positions", "determinism")
"""Slow laws, which look at all configurations alike."""


def assert_conforms(function, convention, **options):
    report = verify(function, convention, **options)
    assert report.passed, text(report)
    return report


def assert_keeps(law, function, convention, **options):
    report = verify(function, convention, laws=[law], **options)
    assert report[law].status == "pass", text(report)


# ---------------------------------------------------------------------------------------- our own functions

test_apply_rope = not_interpreted(pytest_laws(ropelab.apply_rope, "ropelab", device="cuda" if HAS_GPU else "cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "interleaved"},
        {"layout": "interleaved", "seq_format": "sbhd", "rotary_dim": 16},
        {"seq_format": "bhsd", "k_heads": 1, "rotary_dim": 2},
        {"inplace": True},
        {"inplace": True, "layout": "interleaved", "seq_format": "sbhd"},
        {"layout": "interleaved", "out_layout": "split_half"},
        {"out_layout": "interleaved", "seq_format": "sbhd"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "layout": "interleaved"},
        {"dtype": torch.float64, "seq_format": "bhsd"},
        {"head_dim": 10, "rotary_dim": 6, "base": 500000.0},
    ],
    ids=lambda options: " ".join(str(v) for v in options.values()),
)
def test_apply_rope_in_other_configurations(options, torch_backend):
    assert_conforms(ropelab.apply_rope, "ropelab", skip=SLOW, **options)


@pytest.mark.parametrize("copy_value", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "interleaved", "out_layout": "split_half", "seq_format": "sbhd", "rotary_dim": 16},
        {"dtype": torch.bfloat16, "layout": "interleaved", "seq_format": "bhsd"},
    ],
    ids=str,
)
def test_keys_and_values_of_latent_attention(copy_value, options, torch_backend):
    assemble = functools.partial(ropelab.assemble_mla_kv, copy_value=copy_value)
    assert_conforms(assemble, "assemble_mla_kv", skip=SLOW, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "interleaved", "seq_format": "sbhd", "rotary_dim": 16}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_the_projection(options, torch_backend):
    assert_conforms(ropelab.qkv_rope, "qkv_rope", skip=SLOW, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"layout": "interleaved", "seq_format": "sbhd"}, {"inplace": True}], ids=str)
def test_the_kernel_in_other_configurations(options):
    laws = ("definition", "adjoint", "all_written", "strides", "guards", "packed", "context_parallel")
    assert_conforms(ropelab.apply_rope, "ropelab", device="cuda", laws=laws, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("copy_value", [True, False])
def test_the_kernels_of_latent_attention(copy_value):
    assemble = functools.partial(ropelab.assemble_mla_kv, copy_value=copy_value)
    laws = ("definition", "tail", "adjoint", "adjoint_strided", "all_written", "packed", "context_parallel")
    assert_conforms(assemble, "assemble_mla_kv", device="cuda", laws=laws, layout="interleaved")


def test_autograd_is_told_what_the_kernel_overwrites():
    device = "cuda" if HAS_GPU else "cpu"
    assert_keeps("inputs_unchanged", ropelab.apply_rope, "ropelab", device=device, inplace=True)


def test_a_slice_of_the_features_in_columns_for_each(torch_backend):
    """``rotary_slice`` and tables with a column for each feature, as Hugging Face has them."""

    def rope(q, k, cos, sin, unsqueeze_dim=1):
        seq_format = "bhsd" if unsqueeze_dim == 1 else "bshd"
        rotary_slice = (0, cos.shape[-1])
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format=seq_format, rotary_slice=rotary_slice)

    assert_conforms(rope, "huggingface", skip=SLOW, maths="wide", rotary_dim=12)


# ------------------------------------------------------------------------------------------------ our peers

RIGHT = {
    "ropelab": ropelab.apply_rope, "qkv_rope": correct.qkv_rope, "assemble_mla_kv": correct.assemble_mla_kv,
    "huggingface": correct.huggingface, "flash_attn": correct.flash_attn,
    "transformer_engine": correct.transformer_engine, "deepspeed": correct.deepspeed, "vllm": correct.vllm,
    "complex": correct.complex_numbers, "module": correct.Module, "plain": correct.plain,
    "flashinfer": correct.flashinfer, "mrope": correct.mrope, "triton_mrope": correct.triton_mrope,
    "fused_apply_mla_rope_for_q": correct.fused_apply_mla_rope_for_q,
    "fused_apply_mla_rope_for_kv": correct.fused_apply_mla_rope_for_kv, "rope_posfreq_epi": correct.rope_posfreq_epi,
}  # fmt: skip


@pytest.mark.parametrize("convention", [c for c in RIGHT if c != "ropelab"])
def test_every_convention_has_functions_that_conform(convention):
    report = assert_conforms(RIGHT[convention], convention)
    assert sum(result.status == "pass" for result in report.results) >= 20


@pytest.mark.parametrize("convention", ["flash_attn", "vllm", "transformer_engine", "flashinfer", "triton_mrope"])
def test_adjacent_pairs(convention):
    assert_conforms(RIGHT[convention], convention, layout="interleaved", skip=SLOW)


@pytest.mark.parametrize("name", ["fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv"])
def test_our_functions_by_megatrons_names(name, torch_backend):
    assert_conforms(getattr(megatron, name), name, dtype=torch.bfloat16, skip=SLOW, columns="repeated")


def from_transformers(model):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return module.apply_rotary_pos_emb


@pytest.mark.parametrize(
    "model, options",
    [
        ("llama", {"layout": "split_half"}),
        ("llama", {"layout": "split_half", "seq_format": "bshd"}),
        ("cohere", {"layout": "interleaved"}),
        ("glm", {"layout": "interleaved", "columns": "split_half"}),
        ("glm", {"layout": "interleaved", "columns": "split_half", "rotary_dim": 8}),
    ],
)
def test_hugging_face(model, options):
    assert_conforms(from_transformers(model), "huggingface", **options)


def test_gpt_j_takes_one_tensor_the_sine_first_and_a_column_for_each_pair():
    one = from_transformers("gptj")

    def both(q, k, cos, sin, unsqueeze_dim):
        return tuple(one(x, sin, cos) for x in (q, k))

    assert_conforms(both, "huggingface", layout="interleaved", seq_format="bshd", columns="pair")


def test_deepseek_reads_adjacent_pairs_and_writes_halves():
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    options = {"layout": "interleaved", "columns": "split_half", "out_layout": "split_half"}
    assert_conforms(module.apply_rotary_pos_emb_interleave, "huggingface", **options)


def llama(xq, xk, freqs_cis):
    """The rotation of Llama as Meta published it."""

    def one(x):
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * freqs_cis[None, :, None]).flatten(3).type_as(x)

    return one(xq), one(xk)


def test_complex_multiplication():
    report = verify(llama, "complex")
    assert report.passed and report["empty"].status == "note"  # reshape(..., -1, 2) of no elements raises
    assert "refuses inputs at every second feature" in report["strides"].message


def nanochat(q, k, cos, sin, unsqueeze_dim=1):
    """A rotation by minus the angle, as nanochat has it throughout."""
    cos, sin = (table.chunk(2, -1)[0].unsqueeze(unsqueeze_dim) for table in (cos, sin))

    def one(x):
        x0, x1 = x.chunk(2, -1)
        return torch.cat((x0 * cos + x1 * sin, x1 * cos - x0 * sin), -1)

    return one(q), one(k)


def test_the_other_sign_is_right_if_declared_and_seen_by_the_definition_alone_if_not():
    assert_conforms(nanochat, "huggingface", sign="reversed", columns="repeated")
    # `extents` and `token_counts` compare with the definition too, in other sizes.
    failed = verify(nanochat, "huggingface", columns="repeated").failed
    assert failed == ("definition", "rounding", "extents", "token_counts")


@pytest.mark.peers
def test_torchembed_0_3_2():
    """The module promises the inputs' dtype, and keeps the promise only where its kernel runs."""
    with packages.imported("torchembed", "0.3.2", "torchembed", "._triton", ".positional") as package:
        report = verify(package.RotaryEmbedding, "module", seq_format="bhsd")
    assert report.failed == ("dtype",)
    assert "torch.bfloat16" in report["dtype"].message


@pytest.mark.peers
@pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU or Triton's interpreter")
def test_torchembed_0_3_2_kernel():
    kernel = packages.load_file("torchembed", "0.3.2", "torchembed/_triton.py")

    def rope(q, k, cos, sin):
        if len(cos) > 1 and not torch.equal(cos, cos[:1].expand_as(cos)):
            raise NotImplementedError("one table for all sequences")
        return kernel.fused_rope_forward(q, k, cos[0], sin[0])

    laws = ("definition", "layout", "adjoint", "adjoint_expanded", "adjoint_strided", "strides", "all_written",
            "positions_per_batch", "second_order", "rounding")  # fmt: skip
    device = "cuda" if HAS_GPU else "cpu"
    heads = {"q_heads": 2, "k_heads": 1, "head_dim": 8}
    declared = {"maths": "wide", "once_differentiable": True, "device": device}
    report = assert_conforms(rope, "huggingface", laws=laws, **declared, **heads)
    assert "one table for all sequences" in report["positions_per_batch"].message


@pytest.mark.parametrize("convention", [c for c in RIGHT if c not in ("complex", "transformer_engine")])
def test_the_last_rows_of_tensors_that_are_large_on_a_gpu(convention):
    """The part of the law ``huge`` that takes gigabytes, with a few thousand elements."""
    kind = CONVENTIONS[convention]
    layouts = {"layout": kind.layouts[0], "out_layout": kind.out_layout or kind.layouts[0]}
    subject = Subject(RIGHT[convention], kind, seq_format=kind.seq_formats[0], narrow=kind.narrow, **layouts,
                      in_place=bool(kind.in_place))  # fmt: skip
    for comparison in _beyond_int32(subject, Sizes(rotary_dim=16), elements=2**12):
        assert comparison.actual.shape[1] == 16 and comparison.excess.max() <= 1


# --------------------------------------------------------------------------------------------- what it says


def test_what_cannot_be_asked_is_not_applicable_and_never_passed():
    report = verify(correct.Module, "module", skip=SLOW)
    for law in ("offsets", "decode", "packed", "zero_length", "context_parallel", "positions_per_batch", "tail"):
        assert report[law].status == "not applicable" and report[law].message
    report = verify(lambda t, freqs: correct.transformer_engine(t, freqs), "transformer_engine")
    assert report.passed and report["packed"].message.endswith("no argument 'tensor_format'")
    assert not verify(correct.Module, "module", laws=["packed"]).passed  # nothing was verified


def sine_of_the_last_head_lost(x, cos, sin):
    y = correct.flash_attn(x, cos, sin)
    y[:, 1:, -1, 1] = 0
    return y


def test_a_failure_says_which_element_of_which_smallest_input():
    result = verify(sine_of_the_last_head_lost, "flash_attn", laws=["definition"])["definition"]
    found = result.counterexample
    assert found.sizes == Sizes(batch=1, tokens=2, q_heads=1, k_heads=1, head_dim=4, rotary_dim=2)
    assert found.where == {"batch": 0, "token": 1, "head": 0, "feature": 1}
    assert found.what == "x" and found.actual == 0 and abs(found.expected) > found.bound
    assert "head 3 of 4, feature 1" in found.pattern
    again = correct.flash_attn(found.case.inputs[0], *(torch.ones(5, 1), torch.zeros(5, 1)))
    assert again.shape == (1, 2, 1, 4)


def test_the_report_in_words_and_as_json():
    report = verify(sine_of_the_last_head_lost, "flash_attn", laws=["definition", "packed", "tail"])
    said = text(report)
    for part in ("definition: Every pair", "batch 0, token 1, head 0, feature 1", "expected", "actual    0", "input "):
        assert part in said
    with pytest.raises(ConformanceError, match="feature 1"):
        report.raise_if_failed()
    saved = json.loads(report.to_json())
    by_law = {result["law"]: result for result in saved["results"]}
    assert not saved["passed"] and by_law["definition"]["counterexample"]["where"]["feature"] == 1
    assert by_law["packed"]["status"] == "not applicable" and by_law["tail"]["status"] == "pass"


def test_nan_is_the_largest_violation_and_valid_json():
    report = verify(lambda x, p: x * float("nan"), "plain", laws=["definition"])
    assert report["definition"].violation == float("inf")
    assert json.loads(report.to_json())["results"][0]["counterexample"]["actual"] == "nan"


def test_a_function_that_raises_is_an_error_with_the_line():
    def raises(x, positions):
        if positions.any():
            raise KeyError("no such table")
        return x.clone()

    result = verify(raises, "plain", laws=["identity", "definition"])["definition"]
    assert result.status == "error" and result.failed
    assert "KeyError" in result.message and "test_conformance.py" in result.message


@pytest.mark.parametrize("returned", [None, 1.0, (torch.ones(2),), torch.ones(2, 3, 4)])
def test_a_function_that_returns_nonsense_fails(returned):
    result = verify(lambda x, positions: returned, "plain", laws=["definition"])["definition"]
    assert result.status == "fail" and "expected" in result.message


def test_memory_is_poisoned_and_the_settings_come_back():
    torch.use_deterministic_algorithms(False)
    with Surroundings().ours():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_laws_share_no_state():
    """The cache that a module fills under one law is gone under the next law."""
    built = []

    def factory(head_dim):
        built.append(head_dim)
        return correct.Module(head_dim)

    verify(factory, "module", laws=["definition", "identity"])
    assert len(built) == 2


def test_a_module_that_takes_a_base_or_nothing_takes_no_head_size():
    """Its head size is that of its inputs."""

    class Rotary(torch.nn.Module):
        def __init__(self, base=10000.0):
            super().__init__()
            self.base = base

        def forward(self, q, k):
            return tuple(correct.Module(x.shape[-1], base=self.base)(x, x)[0] for x in (q, k))

    for base in (10000.0, 500_000.0):
        assert verify(Rotary, "module", base=base, laws=["definition"]).passed
    assert verify(lambda: Rotary(), "module", laws=["definition"]).passed
    assert not verify(lambda base: Rotary(2 * base), "module", base=500.0, laws=["definition"]).passed


@pytest.mark.parametrize(
    "hit, words",
    [
        (np.s_[:, 1:], "only tokens >= 1 of 5"),
        (np.s_[..., 4:], "only features >= 4, which do not rotate"),
        (np.s_[..., :4], "only features < 4, which rotate"),
        (np.s_[:, :, 0, 1::2], "only head 0 of 3, odd features"),
        (np.s_[1, :, :, 2:4], "only batch 1 of 2, features 2 to 3"),
        (np.s_[:, [0, 1, 4]], "only tokens 0, 1, 4"),
        (np.s_[:, [0, 3]], "only tokens 0, 3"),
        (np.s_[:, :3], "only tokens <= 2"),
        (np.s_[:], "along all axes"),
    ],
)
def test_the_pattern_of_wrong_elements(hit, words):
    actual = np.zeros((2, 5, 3, 6))
    actual[hit] = 1
    case = Case((torch.zeros(2, 5, 3, 6),), 4)
    assert pattern(Comparison("x", actual, np.zeros(1), np.zeros(1), case), 4).endswith(words)


# ------------------------------------------------------------------------------------------- how it is used


def test_one_line_of_pytest():
    test = pytest_laws(sine_of_the_last_head_lost, "flash_attn")
    [mark] = test.pytestmark
    assert mark.args[1] == [law.name for law in LAWS.values() if law.by_default]
    test("tail")
    with pytest.raises(pytest.fail.Exception, match="feature 1"):
        test("definition")
    with pytest.raises(pytest.skip.Exception, match="no argument"):
        test("packed")


def test_positions_of_cases():
    def case(tokens, **where):
        return Case((torch.zeros(where.pop("batch", 1), tokens, 1, 2),), 2, **where).token_positions().tolist()

    assert case(3, batch=2, offsets=(4, 0)) == [[4, 5, 6], [0, 1, 2]]
    assert case(6, lengths=(2, 0, 3), offsets=(5, 9, 1)) == [[5, 6, 1, 2, 3, ropelab.NO_POSITION]]
    assert case(4, shard=(2, 1)) == [[2, 3, 4, 5]] and case(4, shard=(2, 0)) == [[0, 1, 6, 7]]
    assert case(4, lengths=(4, 4), shard=(2, 1)) == [[1, 2, 1, 2]]


def test_a_law_that_compares_nothing_is_not_applicable():
    law = functools.partial(type(LAWS["tail"]), "none", "-", "-")
    assert hold(law(lambda subject, sizes: iter(())), lambda: None, Sizes()).status == "not applicable"

    def never(subject, sizes):
        raise NotApplicable("never")
        yield

    assert hold(law(never), lambda: None, Sizes()).message == "never"
