"""Right operators that write a cache keep every law, every law can fail, and every fault is caught."""

import re
import sys

import pytest
import torch

import ropelab
from ropelab.bench import peers
from ropelab.conformance import CACHE_CONVENTIONS, CACHE_LAWS, verify
from ropelab.conformance.report import text
from ropelab.interop import vllm
from ropelab.kernels import use_backend
from ropelab.kernels.float8 import FLOAT8_DTYPES
from tests.laws.cache_correct import CORRECT, FORMS, Operator
from tests.laws.cache_faults import CACHE_FAULTS

OURS = {
    "rope_and_cache": ropelab.rope_and_cache,
    "rope_and_cache_row_scales": ropelab.rope_and_cache,
    "rotate_cached_keys": ropelab.rotate_cached_keys,
    "mla_rope_and_cache": ropelab.mla_rope_and_cache,
    "fused_qknorm_rope_cache": vllm.fused_qknorm_rope_cache,
    "concat_and_cache_mla_rope_fused": vllm.concat_and_cache_mla_rope_fused,
}
BLOCK_SCALES = {
    "rope_and_quantize": ropelab.rope_and_quantize,
    "rope_and_quantize_packed": ropelab.rope_and_quantize,
    "rope_and_quantize_indexer": ropelab.rope_and_quantize_indexer,
    "rope_and_block_scaled_cache": ropelab.rope_and_block_scaled_cache,
}
DEFINITIONS = ("definition", "float8", "token_counts", "decode", "drafts")
"""The laws that compare with the definition."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_conforms(function, convention, **options):
    report = verify(function, convention, **options)
    assert report.passed, text(report)
    return report


# ------------------------------------------------------------------------------------------------ what is right


def takes(convention, dtype):
    return dtype in CACHE_CONVENTIONS[convention].dtypes


def of_each(convention):
    """The convention with each dtype that it takes, the first of them at core."""
    first, *others = [dtype for dtype in DTYPES if takes(convention, dtype)]
    return [(convention, first), *(pytest.param(convention, dtype, marks=pytest.mark.full) for dtype in others)]


@pytest.mark.parametrize("convention, dtype", [case for name in CORRECT for case in of_each(name)], ids=str)
def test_a_right_operator_in_plain_torch(convention, dtype):
    report = assert_conforms(CORRECT[convention], convention, dtype=dtype)
    addressed = CACHE_CONVENTIONS[convention].addressed
    assert sum(result.status == "pass" for result in report.results) >= (11 if addressed else 8)
    assert sum(result.compared for result in report.results) > 1000


@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
@pytest.mark.parametrize("convention", OURS)
def test_our_operators_in_torch(convention, layout):
    if layout not in CACHE_CONVENTIONS[convention].layouts:
        layout = "split_half"
    with use_backend("torch"):
        names = [law.name for law in CACHE_LAWS.values()]
        assert_conforms(OURS[convention], convention, layout=layout, laws=names, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 64, "rotary_dim": 16}, {"q_heads": 3}], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("convention", BLOCK_SCALES)
def test_our_operators_with_block_scales(convention, dtype, sizes):
    """Eight laws at least; a dtype that the operator does not take is no fault."""
    with use_backend("torch"):
        report = verify(BLOCK_SCALES[convention], convention, dtype=dtype, **sizes)
    assert report.verdict == ("right" if takes(convention, dtype) else "not judged"), text(report)
    assert report.verdict != "right" or sum(result.status == "pass" for result in report.results) >= 8


VARIANTS = {
    "norm last": {"norm_last": True},
    "norm across heads": {"norm_across": True},
    "table-free": {"table_free": True},
    "all": {"norm_last": True, "norm_across": True, "table_free": True},
}
"""The claims to `verify` about an operator that has another norm, or no tables."""
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("maths", ["wide", "narrow"])
def test_a_right_operator_of_every_variant(variant, dtype, maths):
    report = assert_conforms(CORRECT["rope_and_cache"], "rope_and_cache", dtype=dtype, maths=maths, **variant)
    assert sum(result.status == "pass" for result in report.results) >= 16


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
def test_our_variants_in_torch(variant, dtype, layout):
    with use_backend("torch"):
        names = tuple(name for name in CACHE_LAWS if name != "row_scales")  # the scales are given
        report = assert_conforms(
            ropelab.rope_and_cache, "rope_and_cache", layout=layout, laws=names, dtype=dtype, **variant
        )
    assert all(result.status == "pass" for result in report.results)


def test_latent_attention_without_tables():
    with use_backend("torch"):
        assert_conforms(ropelab.mla_rope_and_cache, "mla_rope_and_cache", laws=tuple(CACHE_LAWS), table_free=True)


def test_the_claim_decides():
    """An operator with one order of norm and rotation, and an operator that takes tables only."""
    function = CORRECT["fused_qknorm_rope_cache"]
    report = verify(function, "fused_qknorm_rope_cache", laws=["definition"], norm_last=True)
    assert report.verdict == "wrong"
    assert_conforms(FORMS["fused_qknorm_rope_cache"](NormLast()), "fused_qknorm_rope_cache", norm_last=True)

    def takes_tables(*arguments, cos, sin, positions, layout, k_out):
        return CORRECT["rope_and_cache"](*arguments, cos=cos, sin=sin, positions=positions, layout=layout, k_out=k_out)

    report = verify(takes_tables, "rope_and_cache", laws=["definition"], table_free=True)
    assert report.verdict == "not judged" and "no argument 'frequencies'" in report["definition"].message


class NormLast(Operator):
    def turned(self, x, weight, cos, sin, layout, norm_last, eps, offset, wide):
        return super().turned(x, weight, cos, sin, layout, True, eps, offset, wide)


def test_other_sizes_and_dtypes():
    with use_backend("torch"):
        sizes = {"head_dim": 10, "rotary_dim": 6, "q_heads": 7, "k_heads": 1}
        assert_conforms(ropelab.rope_and_cache, "rope_and_cache", dtype=torch.float64, **sizes)
        assert_conforms(ropelab.rope_and_cache, "rope_and_cache", rotary_dim=16)


# ----------------------------------------------------------------------------------------------- laws can fail


class MorePerCall(Operator):
    calls = 0

    def rotate(self, x, cos, sin, layout):
        self.calls += 1
        return super().rotate(x, cos, sin, layout) * (1 + 1e-3 * self.calls)


class SomeNotWritten(Operator):
    def __call__(self, q, *arguments, **options):
        y, k = super().__call__(q, *arguments, **options)
        y = torch.full_like(y, float("nan")).index_copy(0, torch.arange(1), y[:1])
        return y, k


class MeanOfAllTokens(Operator):
    def norm(self, x, weight, eps, offset, wide):
        return super().norm(x - x[1:2].mean(), weight, eps, offset, wide)


class NoNorm(Operator):
    def norm(self, x, weight, eps, offset, wide):
        return x.to(wide) * (weight.to(wide) + offset)


class NoNormOfManyTokens(NoNorm):
    def norm(self, x, *of):
        return super().norm(x, *of) if len(x) > 64 else Operator.norm(self, x, *of)


class ValuesInHalf(Operator):
    def write(self, cache, slots, rows, scale, other):
        super().write(cache, slots, rows.half().to(rows.dtype), scale, other)


class Truncated(Operator):
    def convert(self, x, dtype, scale):
        y = super().convert(x, dtype, scale)
        if dtype not in FLOAT8_DTYPES:
            return y
        beyond = y.float().abs() > self.divide(x, scale).float().abs()
        return (y.view(torch.uint8) - beyond.to(torch.uint8)).view(dtype)


class OrderedByToken(Operator):
    def rotate(self, x, cos, sin, layout):
        return super().rotate(x, cos, sin, layout) * (1 + torch.arange(len(x))[:, None, None] * 1e-3)


class PlaceIgnored(Operator):
    def address(self, slots, cache, other):
        return slots // cache.shape[1], slots % cache.shape[1] * 0


def overwrites_its_slots(q, k, v, key_cache, value_cache, slot_mapping, **options):
    found = CORRECT["rope_and_cache"](q, k, v, key_cache, value_cache, slot_mapping, **options)
    slot_mapping.zero_()
    return found


class ScaleNotLinear(Operator):
    def scale(self, scales, which):
        return None if scales[which] is None else scales[which].add(0.5)


WRONG = {
    "definition": NoNorm(),
    "float8": Truncated(),
    "token_counts": NoNormOfManyTokens(),
    "row_scales": CACHE_FAULTS["scale_of_a_token"].function,
    "relative_position": CACHE_FAULTS["key_stored_before_the_rotation"].function,
    "other_slots_unchanged": CACHE_FAULTS["slot_off_by_one_block"].function,
    "skipped_slots": CACHE_FAULTS["skipped_slots_written"].function,
    "fewer_slots": CACHE_FAULTS["more_tokens_than_slots"].function,
    "slots_permute": PlaceIgnored(),
    "cache_arrangement": CACHE_FAULTS["stride_of_the_wrong_cache"].function,
    "tokens_permute": OrderedByToken(),
    "neighbours": MeanOfAllTokens(),
    "decode": CACHE_FAULTS["decoding_a_position_ahead"].function,
    "drafts": CACHE_FAULTS["rejected_drafts_stay"].function,
    "keys_independent": CACHE_FAULTS["weights_of_queries_for_keys"].function,
    "stored_is_the_result": ValuesInHalf(),
    "scale_law": ScaleNotLinear(),
    "scales_apart": CACHE_FAULTS["scale_of_keys_for_values"].function,
    "norm_removes_the_size": NoNorm(),
    "inputs_unchanged": overwrites_its_slots,
    "all_written": SomeNotWritten(),
    "equals_separate_launches": MorePerCall(),
}
"""Law -> an operator that breaks it."""


def test_every_law_has_an_operator_that_breaks_it():
    assert set(WRONG) == set(CACHE_LAWS)


@pytest.mark.parametrize("law", WRONG)
def test_law_can_fail(law):
    wrong = WRONG[law]
    function = FORMS["rope_and_cache"](wrong) if isinstance(wrong, Operator) else wrong
    convention = "rope_and_cache_row_scales" if law == "row_scales" else "rope_and_cache"
    report = verify(function, convention, laws=[law])
    assert report.failed == (law,) and not report.passed, text(report)
    assert report[law].counterexample is not None or report[law].message
    if law != "equals_separate_launches":
        right = verify(CORRECT[convention], convention, laws=[law])
        assert right[law].status == "pass", text(right)


def forgets_a_scale(x, *, scales, **options):
    before = scales[-1].clone()
    found = CORRECT["rope_and_quantize"](x, scales=scales, **options)
    scales[-1] = before
    return found


def turns_by_the_place(x, *, positions, **options):
    return CORRECT["rope_and_quantize"](x, positions=positions.abs() % 32 + torch.arange(len(x)), **options)


def writes_a_token_more(x, *, out, **options):
    found = CORRECT["rope_and_quantize"](x, out=out, **options)
    behind = out.view(torch.uint8).as_strided((1,), (1,), out.storage_offset() + out.numel() + options["scales"].nbytes)
    behind.add_(1)
    return found


def rounds_a_weight(q, weights, *, weights_out, **options):
    found = CORRECT["rope_and_quantize_indexer"](q, weights, weights_out=weights_out, **options)
    weights_out[0] *= 1 + 2.0**-20
    return found


def ends_with_the_tokens(x, *, scales, **options):
    return _allocates(x, scales, options, lambda shape, strides: torch.empty_strided(shape, strides))


def leaves_old_numbers_behind_the_tokens(x, *, scales, **options):
    def make(shape, strides):
        return torch.ones(2 * shape[1] * strides[1]).as_strided(shape, strides)

    return _allocates(x, scales, options, make)


def _allocates(x, scales, options, make):
    """The operator, which makes scales itself whose columns begin at multiples of 16 bytes."""
    if scales is not None:
        return ropelab.rope_and_quantize(x, scales=scales, **options)
    right = ropelab.rope_and_quantize(x, **options | {"out": None})
    return right[0], make(right[1].shape, right[1].stride()).copy_(right[1])


@pytest.mark.parametrize(
    "function, convention, law",
    [
        (forgets_a_scale, "rope_and_quantize", "all_written"),
        (ends_with_the_tokens, "rope_and_quantize", "all_written"),
        (leaves_old_numbers_behind_the_tokens, "rope_and_quantize", "all_written"),
        (turns_by_the_place, "rope_and_quantize", "tokens_permute"),
        (writes_a_token_more, "rope_and_quantize", "other_slots_unchanged"),
        (rounds_a_weight, "rope_and_quantize_indexer", "definition"),
    ],
)
def test_laws_of_block_scales_can_fail(function, convention, law):
    report = verify(function, convention, laws=[law])
    assert report.failed == (law,), text(report)


# --------------------------------------------------------------------------------------------------- the faults

ALL = [pytest.param(fault, id=name) for name, fault in CACHE_FAULTS.items()]


def test_at_least_eight_are_seen_in_the_wild():
    assert sum(fault.seen_in is not None for fault in CACHE_FAULTS.values()) >= 8
    named = {"slot_off_by_one_block", "stride_of_the_wrong_cache", "scale_inverted", "norm_after_rounding",
             "weights_of_queries_for_keys", "skipped_slots_written", "key_turned_twice",
             "positions_of_the_padded_batch"}  # fmt: skip
    assert named <= set(CACHE_FAULTS)


@pytest.mark.parametrize("fault", ALL)
def test_an_entry_says_what_is_wrong_where_it_was_seen_and_what_must_notice(fault):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", fault.name)
    assert fault.sentence.endswith(".") and fault.symptom
    assert fault.seen_in is None or re.search(r"\w#\d+", fault.seen_in)
    assert fault.must_fail and set(fault.must_fail) <= set(CACHE_LAWS)
    assert fault.convention in CACHE_CONVENTIONS


@pytest.mark.parametrize("fault", ALL)
def test_a_fault_breaks_its_laws(fault):
    laws = None if fault.only_definition else fault.must_fail
    report = verify(fault.function, fault.convention, laws=laws, shrink=False, **fault.options)
    assert set(fault.must_fail) <= set(report.failed), report.failed
    assert not fault.only_definition or set(report.failed) <= set(DEFINITIONS), report.failed


def test_a_fault_breaks_its_law_in_another_convention():
    operator = type(CACHE_FAULTS["skipped_slots_written"].function.__closure__[0].cell_contents)
    function = FORMS["fused_qknorm_rope_cache"](operator())
    report = verify(function, "fused_qknorm_rope_cache", laws=["skipped_slots"], shrink=False)
    assert report.failed == ("skipped_slots",)


# ------------------------------------------------------------------------------------------------- how it is used


def test_the_smallest_counterexample_names_slots_and_caches():
    fault = CACHE_FAULTS["slot_off_by_one_block"]
    report = verify(fault.function, fault.convention, laws=["definition"])
    found = report["definition"].counterexample
    assert found.sizes.q_heads == found.sizes.k_heads == 1
    assert "slots [" in text(report) and "block_size 16" in text(report)
    assert found.as_dict()["slots"] == found.case.slots.tolist()


def test_a_refusal_of_8_bit_floats_is_no_fault():
    def without(*arguments, k_scale=None, **options):
        if k_scale is not None:
            raise RuntimeError("no such dtype")
        return CORRECT["rope_and_cache"](*arguments, k_scale=None, **options)

    report = assert_conforms(without, "rope_and_cache")
    assert report["float8"].status == "not applicable" and "no such dtype" in report["float8"].message


@pytest.mark.parametrize(
    "options, message",
    [
        ({"laws": ["adjoint"]}, "law: expected one of"),
        ({"out_layout": "interleaved"}, "out_layout: expected split_half"),
        ({"columns": "interleaved"}, "columns: expected None"),
        ({"inplace": True}, "inplace: expected False"),
        ({"convention": "fused_qknorm_rope_cache", "layout": "interleaved"}, "layout: expected one of"),
        ({"convention": "mla_rope_and_cache", "seq_format": "bshd"}, "seq_format: expected one of"),
        ({"convention": "mla_rope_and_cache", "norm_last": True}, "norm_last: expected False"),
        ({"convention": "fused_qknorm_rope_cache", "table_free": True}, "table_free: expected False"),
        ({"convention": "plain", "norm_across": True}, "norm_across: expected False"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        verify(ropelab.rope_and_cache, **{"convention": "rope_and_cache"} | options)


@pytest.mark.process
@pytest.mark.parametrize(
    "target, convention, options, code",
    [
        ("tests.laws.cache_faults:norm_of_each_head.function", "rope_and_cache", ["--norm-across"], 1),
        ("ropelab.interop.vllm:fused_qknorm_rope_cache", "fused_qknorm_rope_cache", [], 0),
    ],
)
def test_the_command(target, convention, options, code, tmp_path, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    from ropelab.command.cli import app

    monkeypatch.setattr(sys, "stdin", None)
    arguments = [
        "verify",
        target,
        "--convention",
        convention,
        "--law",
        "definition",
        "--json",
        str(tmp_path / "r"),
        *options,
    ]
    result = testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert (tmp_path / "r").read_text()


# ----------------------------------------------------------------------------------------------------- on a GPU

SIZES = {"head_dim": 128, "q_heads": 32, "k_heads": 8, "dtype": torch.bfloat16, "device": "cuda"}
LATENT = {"head_dim": 64, "q_heads": 16, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
@pytest.mark.parametrize("convention", list(OURS)[:4])
def test_our_kernel_on_a_gpu(convention, layout):
    sizes = LATENT if convention == "mla_rope_and_cache" else SIZES
    assert_conforms(OURS[convention], convention, laws=tuple(CACHE_LAWS), layout=layout, shrink=False, **sizes)


def vllms(name: str):
    return getattr(peers.torch_library.operators("vllm"), name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("convention", BLOCK_SCALES)
def test_our_kernel_with_block_scales_on_a_gpu(convention, dtype):
    head_dim = 128 if convention == "rope_and_quantize_indexer" else 512
    sizes = {"head_dim": head_dim, "rotary_dim": 64, "q_heads": 8, "dtype": dtype, "device": "cuda"}
    assert_conforms(BLOCK_SCALES[convention], convention, shrink=False, **sizes)


@pytest.mark.peers
@pytest.mark.gpu
@pytest.mark.parametrize("convention, sizes", [("fused_qknorm_rope_cache", SIZES),
                                               ("concat_and_cache_mla_rope_fused", LATENT)])  # fmt: skip
def test_vllms_operators(convention, sizes):
    """The operators of vLLM 0.33.0 are right if they declare narrow arithmetic.

    The operator with a norm rounds between the steps. The operator of MLA refuses tables in float32.
    """
    function = vllms(convention)
    assert_conforms(function, convention, shrink=False, **sizes)
    wide = verify(function, convention, laws=["definition"], maths="wide", shrink=False, **sizes)
    assert wide.failed == ("definition",)
