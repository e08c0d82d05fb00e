"""Measure the RMS norm of q and k with the rotation, in one pass and as separate kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import torch._functorch.config

import ropelab
from ropelab import reference
from ropelab.bench import cells, copies, in_parts, qk_norm_in_qkv, timing
from ropelab.bench.compare import tidy
from ropelab.bench.workloads import DENSE_CELLS, Buffers, Workload
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS

EPS = 1e-6
STEPS = ("forward", "backward", "forward and backward")

NormRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of q, k and the weights of the two norms that returns the new q and k."""


def qk_norm(*, smoke: bool = False) -> pd.DataFrame:
    """Time all contenders that are right, in two cells, in both layouts, for every step.

    The backward computes the gradients of q, k and both weights from given gradients of the new q and k. vLLM's and
    SGLang's operators have a forward only, and work in place in a packed qkv.

    Columns: the columns of the workload without direction; step, contender, status, median_us, q20_us, q80_us,
        samples; and fraction_of_copy. For every step, the copy reads q and k once and writes them once.
    """
    chosen = DENSE_CELLS[-1:] if smoke else DENSE_CELLS[:2]
    shapes = [replace(cell.workload, layout=layout) for cell in chosen for layout in LAYOUTS]
    if timing.is_stopped() and not smoke:
        return in_parts.compiled(
            _shapes, [([shape for shape in shapes if shape.layout == name], 1) for name in LAYOUTS]
        )
    return _shapes(shapes, rounds=3 if smoke else 15)


def _shapes(shapes: Sequence[Workload], rounds: int) -> pd.DataFrame:
    return cells.table(shapes, lambda shape: _compare(shape, rounds), lambda shape: shape.description)


def _compare(shape: Workload, rounds: int) -> pd.DataFrame:
    sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
    learned = weights(shape, sets[0].q.device)
    found = contenders(shape, sets[0])
    outcome = {name: status(rotate, shape, sets[0], learned) for name, rotate in found.items()}
    in_qkv, forward_outcome = qk_norm_in_qkv.operators(shape, sets[0], learned, EPS)
    forward_outcome |= {name: status(run, shape, sets[0], learned, STEPS[:1]) for name, run in in_qkv.items()}
    identity = {name: value for name, value in shape.columns.items() if name != "direction"}
    frames = []
    for step in STEPS:
        here = outcome | (forward_outcome if step == "forward" else {})
        right = [name for name, why in here.items() if why == "ok"]
        timed = {name: partial(calls, found[name], sets, learned, step) for name in right if name in found}
        timed |= {name: partial(in_qkv[name].calls, sets) for name in right if name in in_qkv}
        frame = timing.gpu_times(timed | copies.contenders([b.inputs for b in sets]), rounds=rounds)
        wrong = {name: why for name, why in here.items() if why != "ok"}
        frames.append(tidy(copies.with_fraction(frame), identity | {"step": step}, wrong))
        torch.cuda.empty_cache()  # the graphs have memory of their own
    return pd.concat(frames, ignore_index=True)


def weights(shape: Workload, device: torch.device | str = "cuda") -> list[torch.Tensor]:
    """Random weights ``[D]`` of the norm of q and of the norm of k."""
    return [torch.randn(shape.head_dim, dtype=shape.dtype, device=device).requires_grad_() for _ in range(2)]


def contenders(shape: Workload, buffers: Buffers) -> dict[str, NormRope]:
    """Our function, and the norm and the rotation of Hugging Face's Qwen3: eager, compiled each, compiled together."""
    cos, sin, layout = buffers.cos, buffers.sin, shape.layout
    wide = [pairing.join(t, t, layout).to(shape.dtype)[: shape.seq_len, None] for t in (cos, sin)]

    def norm(x, weight):
        x_wide = x.float()
        return weight * (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)

    def norms(q, k, q_weight, k_weight):
        return norm(q, q_weight), norm(k, k_weight)

    def rotation(x):
        x0, x1 = pairing.pairs(x, layout)
        return x * wide[0] + pairing.join(-x1, x0, layout) * wide[1]

    def rotations(q, k):
        return rotation(q), rotation(k)

    def one_after_the_other(norms, rotations):
        return lambda *tensors: rotations(*norms(*tensors))

    # Without the reset, torch.compile reaches its limit of recompilations. Donated buffers forbid a second backward.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    compiled = partial(torch.compile, dynamic=False, fullgraph=True)
    return {
        "ropelab": partial(ropelab.apply_qk_norm_rope, cos=cos, sin=sin, eps=EPS, layout=layout),
        "compiled separate": one_after_the_other(compiled(norms), compiled(rotations)),
        "compiled together": compiled(one_after_the_other(norms, rotations)),
        "eager separate": one_after_the_other(norms, rotations),
    }


def status(
    rotate: NormRope, shape: Workload, buffers: Buffers, learned: Sequence[torch.Tensor], steps: Sequence[str] = STEPS
) -> str:
    """``"ok"`` if results and gradients agree with float64 within 12 unit roundoffs, else the reason.

    The gradients are compared if the contender has another step than the forward.

    A contender with a separate norm rounds to the dtype of q at most eight times on the way to a result. It rounds the
    norm, the product of the norm and the weight, the tables, and the products and sums of the rotation. A rotation
    increases the error of a pair by at most sqrt(2). The error is therefore at most 12 unit roundoffs, relative to the
    norm of the whole tensor. With the clock stopped, nothing is compared.
    """
    if timing.is_stopped():
        return "ok"
    tensors = [x.detach().requires_grad_() for x in (*buffers.inputs, *learned)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    try:
        outputs = rotate(*tensors)
        found = list(outputs)
        if "backward" in steps:
            found += torch.autograd.grad(outputs, tensors, buffers.cotangents)
    except Exception as error:  # the status records the error
        return timing.failure(error)
    normed = [
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w for x, w in zip(exact[:2], exact[2:], strict=True)
    ]
    truth = [reference.rotate(x, buffers.cos, buffers.sin, layout=shape.layout) for x in normed]
    truth += torch.autograd.grad(truth, exact, [g.double() for g in buffers.cotangents])
    names = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")
    compared = len(names) if "backward" in steps else 2
    for name, y, right in zip(names[:compared], found, truth[:compared], strict=True):
        error = ((y.double() - right).norm() / right.norm()).item()
        if not error <= 12 * torch.finfo(shape.dtype).eps / 2:
            return f"wrong: {name} has relative error {error:.3g}"
    return "ok"


def calls(
    rotate: NormRope, sets: Sequence[Buffers], learned: Sequence[torch.Tensor], step: str
) -> list[Callable[[], object]]:
    """One call for each set of buffers. For the step "backward", this function runs the forward."""
    if step == "forward":
        return [partial(rotate, *b.inputs, *learned) for b in sets]

    def gradients(b: Buffers, outputs=None):
        outputs, keep = (rotate(*b.inputs, *learned), False) if outputs is None else (outputs, True)
        return torch.autograd.grad(outputs, (*b.inputs, *learned), b.cotangents, retain_graph=keep)

    if step == "backward":
        return [partial(gradients, b, rotate(*b.inputs, *learned)) for b in sets]
    return [partial(gradients, b) for b in sets]
