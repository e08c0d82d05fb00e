"""Compile the kernels of multi-head latent attention for a GPU that need not be there, and look at the code.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import itertools
import sys
from dataclasses import replace

import torch

from ropelab.kernels import Rotation, latent_triton
from ropelab.kernels.tensors import LatentGradients, LatentTensors, TailTensors
from tests.compile import compile_kernel

# heads, N, R, V
SHAPES = [(128, 128, 64, 128), (20, 192, 64, 256)]


def kernels(capability, shape, *, tokens=4096, positions=None, dtype=torch.bfloat16, tile=None):
    """The kernels that a training step of these sizes launches: forward (also with a value that is a view of kv), tail
    in place, backward.
    """
    heads, nope_dim, rotary_dim, value_dim = shape

    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    kv, k_pe = empty(1, tokens, heads, nope_dim + value_dim), empty(1, tokens, 1, rotary_dim)
    q, value = empty(1, tokens, heads, nope_dim + rotary_dim), empty(1, tokens, heads, value_dim)
    cos = empty(tokens, rotary_dim // 2, dtype=torch.float32)
    rotation = Rotation(rotary_dim, nope_dim, interleaved=True, out_interleaved=False)
    back = Rotation(rotary_dim, nope_dim, interleaved=False, out_interleaved=True, transpose=True)
    where = cos, cos, positions
    assembled, tail = LatentTensors(kv, k_pe, q, value, *where), TailTensors(q, *where)
    gradients = LatentGradients(q, value, kv, k_pe, *where)
    turn_tail, arguments = latent_triton.plan_turn_tail(tail, rotation, tile), []
    replace(turn_tail, launch=lambda *given: arguments.extend(given))(tail, 0, tokens)
    viewed = assembled._replace(value=None)
    found = {
        "forward": (latent_triton.plan_forward(assembled, rotation, tile), (assembled, 0, tokens)),
        "forward with a view": (latent_triton.plan_forward(viewed, rotation, tile), (viewed, 0, tokens)),
        "turn_tail": (turn_tail.launch, arguments),
        "backward": (latent_triton.plan_backward(gradients, back, tile), (gradients, 0, tokens)),
    }
    return {name: compile_kernel.compiled(*one, capability) for name, one in found.items()}


def main(capability: int) -> None:
    """Loads and stores of 16 bytes, and no spilled registers."""
    positions = torch.empty(1, 4096, dtype=torch.int32, device="meta")
    for shape, where in itertools.product(SHAPES if capability == 90 else SHAPES[:1], (None, positions)):
        for name, found in kernels(capability, shape, positions=where).items():
            width = 8 if name == "turn_tail" else 16  # the halves of the tail have few features
            compile_kernel.check_accesses(f"sm_{capability} {name} {shape}", found, width)


if __name__ == "__main__":
    main(int(sys.argv[1]))
