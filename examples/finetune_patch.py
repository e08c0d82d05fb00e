"""Fine-tune a Llama of Hugging Face with and without `patch`: one line, and the same losses.

The weights are random. With a checkpoint, ``AutoModelForCausalLM.from_pretrained(...)`` takes the place of the model.

It takes some 15 s of CPU time on two cores.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ropelab.interop.huggingface import patch

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def finetune(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.arange(33, device=device).repeat(4, 1) + torch.tensor([[0], [7], [14], [21]], device=device)
    losses = []
    for _ in range(20):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.float64)  # float64 tells a wrong gradient from rounding


without = finetune(model())
patched = model()
with patch(patched):  # every layer now calls ropelab; the end of the block puts Hugging Face's function back
    within = finetune(patched)

difference = ((within - without) / without).abs().max()
print(
    f"{device}: loss {without[0]:.3f}, after {len(without)} steps {without[-1]:.3f}; with patch {difference:.0e} apart"
)
assert without[-1] < without[0] / 2
# A step amplifies the rounding of the step before. Of 16 digits, 20 steps may lose half; a wrong gradient loses all.
assert difference < torch.finfo(torch.float64).eps ** 0.5
