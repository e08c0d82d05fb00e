"""One line makes DeepSpeed's own files use the kernel, for all shapes of its callers; ``undo`` takes it back."""

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

from ropelab.interop.broadcast import formula
from ropelab.interop.deepspeed import fused_rope_forward, patch
from ropelab.study.documents.deepspeed import CALLERS, rounding_bound
from tests.conftest import HAS_GPU
from tests.interop.deepspeed_package import deepspeed_sequence

DEVICE = "cuda" if HAS_GPU else "cpu"
B, S, H, D = 2, 5, 3, 8
BROADCASTING = [caller for caller in CALLERS if caller[0] != "[s, b, h, d] with [s, d]"]
DTYPES = [
    # of the tensor, of the tables
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]


@pytest.fixture
def files():
    """DeepSpeed's sequence layer and FPDT layer."""
    with deepspeed_sequence() as modules:
        yield modules


def draw(t_shape, table_shape, dtype=torch.float64, table_dtype=None):
    """A tensor, and tables whose columns differ between the halves."""
    tables = torch.rand(2, *table_shape, dtype=torch.float64) * 2 - 1
    return [x.to(DEVICE, d) for x, d in ((torch.randn(t_shape, dtype=torch.float64), dtype),
                                         *((table, table_dtype or dtype) for table in tables))]  # fmt: skip


def result_and_gradients(function, tensors):
    """The result, and the gradients of the tensor and of the tables."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = function(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, leaves, cotangent.to(y))]


@pytest.mark.peers
@pytest.mark.parametrize(
    "caller, in_tree, t_shape, table_shape", BROADCASTING, ids=[caller[0] for caller in BROADCASTING]
)
def test_the_patch_computes_deepspeeds_result_and_gradients_in_one_launch(
    files, launches, caller, in_tree, t_shape, table_shape
):
    """The comparison is in float64, where a rotation that differs in more than rounding shows."""
    layer, _ = files
    tensors = draw(t_shape, table_shape)
    theirs = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    assert not launches
    with patch():
        launches.clear()
        layer.apply_rotary_pos_emb(*tensors)
        assert len(launches) == 1
        ours = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("dtype, table_dtype", DTYPES, ids=str)
def test_the_dtype_is_deepspeeds_and_the_error_a_rounding(files, dtype, table_dtype):
    layer, _ = files
    tensors = draw((B, S, H, D), (1, S, 1, D), dtype, table_dtype)
    exact = result_and_gradients(formula, [x.double() for x in tensors])
    theirs = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    with patch():
        ours = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    for found, right in zip(ours[:2], exact[:2], strict=True):
        assert (found.double() - right).norm() <= rounding_bound(found.dtype) * right.norm()


@pytest.mark.peers
def test_the_gradient_that_fpdt_computes_by_hand(files, launches):
    """FPDT's backward calls a separate function, whose tables need not have equal halves."""
    _, fpdt_layer = files
    tensors = draw((B, S, H, D), (1, S, 1, D - 2))
    expected = fpdt_layer.apply_rotary_pos_emb_backward(*tensors)
    with patch():
        launches.clear()
        found = fpdt_layer.apply_rotary_pos_emb_backward(*tensors)
    assert len(launches) == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize(
    "t_shape, table_shape",
    [((B, S, H, D), (B, S, H, D)), ((B, S, 2, H, D), (1, S, 1, 1, D)), ((S, H, D), (1, S, 1, D))],
    ids=str,
)
def test_what_one_launch_cannot_compute_goes_to_deepspeeds_own_function(files, launches, t_shape, table_shape):
    layer, _ = files
    tensors = draw(t_shape, table_shape)
    expected = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    with patch():
        launches.clear()
        found = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    assert not launches
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------- the optional backend


def on_the_accelerator(layer):
    """Open the device test of DeepSpeed's gate, as a GPU would."""
    return mock.patch.object(layer.get_accelerator(), "on_accelerator", lambda t: True)


@pytest.mark.parametrize("shape", [(S, D), (H, S, D), (B, H, S, D), (2, B, H, S, D)], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float64, torch.float32], ids=str)
def test_the_optional_backend_is_the_formula(launches, shape, table_dtype):
    q, cos, sin = draw(shape, (S, D), torch.float32, table_dtype)
    k = torch.randn_like(q)
    q_out, k_out = fused_rope_forward(q, k, cos, sin)
    assert len(launches) == 2 and q_out.dtype == k_out.dtype == table_dtype
    for x, y in ((q, q_out), (k, k_out)):
        torch.testing.assert_close(y.double(), formula(*(z.double() for z in (x, cos, sin))), rtol=1e-6, atol=1e-6)
    for place in (0, 1):
        assert torch.equal(fused_rope_forward(q, q, cos, sin)[place], q_out)
    assert len(launches) == 4  # a tensor that is q and k is rotated once
    tensors = [x.double() for x in (q, cos, sin)]
    found, expected = (
        result_and_gradients(f, tensors) for f in (lambda x, c, s: fused_rope_forward(x, x, c, s)[0], formula)
    )
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize(
    "dtype, table_dtype", [(torch.float64, torch.float64), (torch.float16, torch.float32)], ids=str
)
def test_deepspeeds_gate_opens_to_the_optional_backend(files, rank, dtype, table_dtype):
    """The gate and the reshaping around the backend are DeepSpeed's own code."""
    layer, _ = files
    tensors = draw((S, *(2,) * (rank - 2), D), (S, *(1,) * (rank - 2), D), dtype, table_dtype)
    expected = result_and_gradients(layer.apply_rotary_pos_emb, tensors)
    own = layer.apply_rotary_pos_emb
    with patch(), on_the_accelerator(layer):
        assert layer._torchembed_available
        with mock.patch.object(layer, "_torchembed_rope_forward", wraps=fused_rope_forward) as backend:
            found = result_and_gradients(own, tensors)
            assert backend.call_count == 1
            layer.apply_rotary_pos_emb(*tensors)
            assert backend.call_count == (2 if rank > 4 else 1)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert (x - y).norm() <= 2 * rounding_bound(x.dtype) * y.norm()


@pytest.mark.parametrize("argument", ["q", "k", "cos", "sin"])
def test_errors_of_the_optional_backend_name_the_argument(argument):
    arguments = {"q": torch.zeros(S, D), "k": torch.zeros(S, D), "cos": torch.zeros(S, D), "sin": torch.zeros(S, D)}
    with pytest.raises(TypeError, match=f"{argument}: expected a torch.Tensor, got None"):
        fused_rope_forward(**arguments | {argument: None})


# -------------------------------------------------------------------------------------------------------- the patch


def names_of(layer):
    return {name: vars(layer).get(name, "absent") for name in
            ("apply_rotary_pos_emb", "_torchembed_available", "_torchembed_rope_forward")}  # fmt: skip


@pytest.mark.peers
def test_undo_puts_everything_back(files):
    layer, fpdt_layer = files
    before, backward = names_of(layer), fpdt_layer.apply_rotary_pos_emb_backward
    patched = patch()
    assert patched.functions == [
        "deepspeed.sequence.fpdt_layer.apply_rotary_pos_emb",
        "deepspeed.sequence.fpdt_layer.apply_rotary_pos_emb_backward",
        "deepspeed.sequence.layer._torchembed_rope_forward",
        "deepspeed.sequence.layer.apply_rotary_pos_emb",
    ]
    assert repr(patched) == f"<patch of {', '.join(patched.functions)}>"
    assert fpdt_layer.apply_rotary_pos_emb is layer.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
    for _ in range(2):
        patched.undo()
        assert names_of(layer) == before and fpdt_layer.apply_rotary_pos_emb is before["apply_rotary_pos_emb"]
        assert fpdt_layer.apply_rotary_pos_emb_backward is backward and repr(patched) == "<patch of nothing>"


@pytest.mark.peers
def test_other_modules_that_imported_the_function_follow(files):
    layer, _ = files
    user = ModuleType("a_users_module")
    user.apply_rotary_pos_emb = own = layer.apply_rotary_pos_emb
    with mock.patch.dict(sys.modules, {"a_users_module": user}):
        with patch():
            assert user.apply_rotary_pos_emb is layer.apply_rotary_pos_emb is not own
        assert user.apply_rotary_pos_emb is own


@pytest.mark.peers
def test_an_early_deepspeed_has_neither_backend_nor_fpdt(files):
    layer, _ = files
    del layer._torchembed_available
    layer.apply_rotary_pos_emb = lambda t, freqs_cos, freqs_sin: formula(t, freqs_cos, freqs_sin)
    with mock.patch.dict(sys.modules, {"deepspeed.sequence.fpdt_layer": None}), patch() as patched:
        assert patched.functions == ["deepspeed.sequence.layer.apply_rotary_pos_emb"]
        assert not hasattr(layer, "_torchembed_available") and not hasattr(layer, "_torchembed_rope_forward")


def interleaved(t, freqs_cos, freqs_sin):
    return formula(t, freqs_cos, freqs_sin, "interleaved")


@pytest.mark.peers
@pytest.mark.parametrize(
    "other", [interleaved, lambda t, freqs_cos, freqs_sin: formula(t, freqs_cos, -freqs_sin), lambda t, freqs: t]
)
def test_a_function_of_another_convention_is_refused(files, other):
    layer, _ = files
    layer.apply_rotary_pos_emb = other
    expected = r"(a rotation of halves|parameters such as \(t, freqs_cos, freqs_sin\)), got"
    with pytest.raises(ValueError, match=f"deepspeed.sequence.layer.apply_rotary_pos_emb: expected {expected}"):
        patch()
    assert layer.apply_rotary_pos_emb is other and not layer._torchembed_available


def test_bools_go_to_deepspeeds_own_function():
    layer = ModuleType("deepspeed.sequence.layer")
    layer.apply_rotary_pos_emb = lambda t, freqs_cos, freqs_sin: formula(t, freqs_cos, freqs_sin)
    parents = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.sequence")}
    modules = parents | {layer.__name__: layer, "deepspeed.sequence.fpdt_layer": None}
    with mock.patch.dict(sys.modules, modules), patch():
        with pytest.raises(RuntimeError, match="bool"):
            layer.apply_rotary_pos_emb(torch.ones(S, D, dtype=torch.bool), *torch.rand(2, S, D))


def test_without_deepspeed_the_patch_says_so():
    with mock.patch.dict(sys.modules, {"deepspeed": None}), pytest.raises(ImportError, match="deepspeed"):
        patch()
