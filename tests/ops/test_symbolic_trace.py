"""`torch.fx.symbolic_trace` records a call of an adapter as one node, and the graph computes what the call computes."""

import pytest
import torch

from ropelab.interop import fairseq2
from ropelab.interop.huggingface import patch
from tests.ops.adapter_calls import ADAPTERS
from tests.ops.hostile_adapters import contents


def tensors_of(call):
    """The arguments that are tensors, or tuples of tensors."""
    return {name: x for name, x in call.items() if isinstance((x, *x)[1] if isinstance(x, tuple) else x, torch.Tensor)}


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_an_adapter_is_one_node(torch_backend, name):
    function, direct, traced = ADAPTERS[name].function, ADAPTERS[name].arguments(), ADAPTERS[name].arguments()
    others = {key: x for key, x in direct.items() if key not in tensors_of(direct)}

    def calls(tensors):
        return function(**{key: tensors[key] for key in tensors_of(direct)}, **others)

    graph = torch.fx.symbolic_trace(calls)
    [node] = [node for node in graph.graph.nodes if "ropelab" in getattr(node.target, "__module__", "")]
    if name != "megatron, rope_utils":  # no node holds its configuration
        assert node.target is function
    found, expected = graph(tensors_of(traced)), function(**direct)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for key, x in contents(tensors_of(traced)).items():
        assert torch.equal(x, contents(tensors_of(direct))[key]), key


@pytest.mark.parametrize("dense", [True, False])
def test_a_module_of_fairseq2_is_one_node(torch_backend, dense):
    """A layout is an input of the graph, as in fairseq2's models."""
    encoder, seqs = fairseq2.KernelRotaryEncoder(8, 16).eval(), torch.randn(2, 5, 3, 8)
    layout = fairseq2.BatchLayout((2, 5), None if dense else [5, 3])

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = encoder

        def forward(self, seqs, layout):
            return self.rotary(seqs * 2, layout) + 1

    for module in (Layer(), encoder):
        traced = torch.fx.symbolic_trace(module, concrete_args={"state_bag": None} if module is encoder else None)
        assert torch.equal(traced(seqs, layout), module(seqs, layout))
        called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert called == (["rotary"] if module is not encoder else [])


def test_a_patched_function_leaves_the_trace_to_the_original(torch_backend):
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8}
    q, k, cos, sin = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    with patch(transformers.LlamaModel(transformers.LlamaConfig(vocab_size=8, **sizes))):
        graph = torch.fx.symbolic_trace(lambda q, k, cos, sin: module.apply_rotary_pos_emb(q, k, cos, sin))
        torch.testing.assert_close(graph(q, k, cos, sin), module.apply_rotary_pos_emb(q, k, cos, sin))
