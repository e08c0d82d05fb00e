"""The faults of gradients; the forward is right in all of them."""

import torch

from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


@fault(
    "The backward applies the forward rotation instead of its transpose.",
    symptom="gradients of the right length in the wrong direction; training that learns badly",
    seen_in="DeepSpeed#8052 (torchembed 0.3.0)",
    convention="deepspeed",
    must_fail=("adjoint",),
)
def backward_applies_forward(t, freqs_cos, freqs_sin):
    def rotate(x):
        return correct.deepspeed(x, freqs_cos, freqs_sin)

    return correct.with_backward(t, forward=rotate, backward=rotate)


@fault(
    "The gradient of the key that heads share sums over a part of the heads.",
    symptom="the shared part of the key learns too slowly, the more so the more ranks share the heads",
    seen_in="Megatron-LM#6839",
    convention="assemble_mla_kv",
    must_fail=("adjoint",),
)
def shared_key_gradient_of_one_head(kv, k_pe, nope_dim, **options):
    key, value = correct.assemble_mla_kv(kv, k_pe.detach(), nope_dim, **options)
    first = correct.assemble_mla_kv(kv, k_pe, nope_dim, **options)[0]
    heads = options["seq_format"].index("h")
    return torch.cat((first.narrow(heads, 0, 1), key.narrow(heads, 1, key.shape[heads] - 1)), heads), value


@fault(
    "The backward writes 1 into the gradient of the features that do not rotate.",
    symptom="wrong gradient, unless the loss is a sum, whose cotangent is 1",
    seen_in="apex#1750",
    convention="transformer_engine",
    options={"rotary_dim": 8},
    must_fail=("adjoint", "tail"),
)
def tail_gradient_is_one(t, freqs, tensor_format="sbhd", **options):
    rotary_dim = freqs.shape[-1]

    def rotate(x):
        return correct.transformer_engine(x, freqs, tensor_format, **options)

    def rotate_back(grad):
        grad = correct.transformer_engine(grad, -freqs, tensor_format, **options)
        return torch.cat((grad[..., :rotary_dim], torch.ones_like(grad[..., rotary_dim:])), dim=-1)

    return correct.with_backward(t, rotate, rotate_back)


@fault(
    "The operation leaves no node in autograd's graph.",
    symptom="queries and keys get no gradient, without an error",
    seen_in="candle#3568, LongLive#61",
    convention="huggingface",
    must_fail=("gradients_reach_inputs",),
)
def no_autograd_node(q, k, cos, sin, unsqueeze_dim=1):
    with torch.no_grad():
        return correct.huggingface(q, k, cos, sin, unsqueeze_dim)


@fault(
    "The gradient stops at the result, and the inputs get zeros.",
    symptom="queries and keys get zero gradient",
    seen_in="equinox#568 (review)",
    convention="plain",
    must_fail=("gradients_reach_inputs", "adjoint"),
)
def gradient_stopped(x, positions):
    return correct.with_backward(x, lambda x: correct.plain(x, positions), torch.zeros_like)


@fault(
    "The backward permutes the heads.",
    symptom="wrong gradient, unless all heads have the same cotangent, as in a sum",
    seen_in=None,
    convention="complex",
    options={"layout": "interleaved"},
    must_fail=("adjoint",),
)
def backward_permutes_heads(xq, xk, freqs_cis):
    def rotate(x, turns):
        return correct.complex_numbers(x, x, turns)[0]

    def one(x):
        return correct.with_backward(x, lambda x: rotate(x, freqs_cis), lambda g: rotate(g.flip(2), freqs_cis.conj()))

    return one(xq), one(xk)


@fault(
    "The backward forgets the offsets of the sequences.",
    symptom="wrong gradient as soon as a sequence does not start at 0",
    seen_in="TransformerEngine (fused QKV, start_positions; read in its source)",
    convention="flash_attn",
    must_fail=("adjoint",),
)
def backward_forgets_offsets(x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, **packed):
    def rotate(x):
        return correct.flash_attn(x, cos, sin, interleaved, seqlen_offsets=seqlen_offsets, **packed)

    def rotate_back(grad):
        return correct.flash_attn(grad, cos, -sin, interleaved, **packed)

    y = correct.with_backward(x, rotate, rotate_back)
    return x.copy_(y) if inplace else y


@fault(
    "The backward rejects a cotangent that is not contiguous.",
    symptom="a crash as soon as the loss is a sum or the next operation transposes",
    seen_in="ROCm/apex#334",
    convention="deepspeed",
    must_fail=("adjoint_expanded", "adjoint_strided"),
)
def strided_gradient_rejected(t, freqs_cos, freqs_sin):
    def rotate_back(grad):
        if not grad.is_contiguous():
            raise RuntimeError(f"grad: expected a contiguous tensor, got strides {grad.stride()}")
        return correct.deepspeed(grad, freqs_cos, -freqs_sin)

    return correct.with_backward(t, lambda x: correct.deepspeed(x, freqs_cos, freqs_sin), rotate_back)


@fault(
    "The angles of learned frequencies are cached together with their graph.",
    symptom="the second backward raises, because the first backward freed the graph",
    seen_in="rotary-embedding-torch#18",
    convention="module",
    must_fail=("second_backward",),
)
class CachedAnglesKeepTheGraph(correct.Module):
    def __init__(self, head_dim, **options):
        super().__init__(head_dim, **options)
        frequencies = self.inv_freq
        del self.inv_freq
        self.inv_freq = torch.nn.Parameter(frequencies)
        self.cached = {}

    def angles(self, seq_len, device):
        if seq_len not in self.cached:
            self.cached[seq_len] = super().angles(seq_len, device)
        return self.cached[seq_len]


@fault(
    "The backward computes cosines and sines anew, and forgets their factor.",
    symptom="gradients of models with YaRN are too small by the attention factor",
    seen_in=None,
    convention="deepspeed",
    must_fail=("adjoint",),
)
def backward_forgets_factor(t, freqs_cos, freqs_sin):
    def rotate_back(grad):
        factor = torch.hypot(freqs_cos, freqs_sin)
        return correct.deepspeed(grad, freqs_cos / factor, -freqs_sin / factor)

    return correct.with_backward(t, lambda x: correct.deepspeed(x, freqs_cos, freqs_sin), rotate_back)


@fault(
    "Cosines and sines are taken as constants.",
    symptom="learned frequencies stay as they are, without an error",
    seen_in=None,
    convention="ropelab",
    must_fail=("table_gradients",),
)
def tables_taken_as_constants(q, k=None, *, cos, sin, **options):
    return correct.ropelab(q, k, cos=cos.detach(), sin=sin.detach(), **options)
