"""Measure the RMS norm of q and k with the rotation, in one pass and as separate kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
import torch._functorch.config

import ropelab
from ropelab import reference
from ropelab.bench import packages, timing
from ropelab.bench.operation import Contender, Operation, table
from ropelab.bench.peers import torch_library
from ropelab.bench.peers.cos_sin_cache import positions
from ropelab.bench.workloads import DENSE_CELLS, Buffers, Workload
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS

EPS = 1e-6
STEPS = ("forward", "backward", "forward and backward")
BASE = 10000.0
"""The base of the frequencies, for an operator that computes the angles itself: the default of `rotary_table`."""

Call = tuple[Buffers, Sequence[torch.Tensor]]
"""The tensors of a call, and the weights ``[D]`` of the norm of q and of the norm of k."""
NormRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of q, k and the weights of the two norms that returns the new q and k."""
InPlace = Callable[[torch.Tensor], object]
"""A function that overwrites q and k in a packed qkv ``[T, (Hq + 2 Hk) D]``; it has the weights already."""


def qk_norm(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time all contenders that are right, in two cells, in both layouts, for every step.

    The backward computes the gradients of q, k and both weights from given gradients of the new q and k. vLLM's and
    SGLang's operators have a forward only, and work in place in a packed qkv.

    Columns: the columns of the workload without direction; step, contender, status, median_us, q20_us, q80_us,
        samples; and fraction_of_copy. For every step, the copy reads q and k once and writes them once.
    """
    chosen = DENSE_CELLS[-1:] if smoke else DENSE_CELLS[:2]
    cells = [QKNorm(replace(cell.workload, layout=layout)) for cell in chosen for layout in LAYOUTS]
    return table(cells, rounds=3 if smoke else 15, device=device, parts=2)


@dataclass(frozen=True)
class QKNorm(Operation):
    """The norm of q and k with the rotation of a workload in bshd, in ``count`` sets; 0 for as many as are cold."""

    work: Workload
    count: int = 0

    steps = STEPS
    step_column = "step"
    differentiates = True

    @property
    def columns(self):
        return {name: value for name, value in self.work.columns.items() if name != "direction"}

    @property
    def description(self):
        return self.work.description

    def sets(self, device):
        return self.with_weights(
            self.work.buffers(self.count or self.work.cold_count(timing.cache_bytes()), device), device
        )

    def with_weights(self, buffers: Sequence[Buffers], device: torch.device | str) -> list[Call]:
        """Calls that share random weights."""
        options = {"dtype": self.work.dtype, "device": device}
        weights = [torch.randn(self.work.head_dim, **options).requires_grad_() for _ in range(2)]
        return [(each, weights) for each in buffers]

    def contenders(self, sets, device):
        found = {name: Contender(run) for name, run in self.functions(sets[0][0]).items()}
        for name, bind in {"vllm": self.vllm, "sglang": self.sglang}.items():
            try:
                run = bind(*sets[0])
            except packages.NotInstalled as error:
                found[name] = Contender(f"not run: {error}", steps=STEPS[:1])
            else:
                found[name] = Contender(
                    partial(self.unpacked, run), steps=STEPS[:1], check=partial(self.check, backward=False),
                    calls=lambda sets, _, run=run: [partial(run, self.packed(*b.inputs)) for b, _ in sets],
                )  # fmt: skip
        return found

    def functions(self, buffers: Buffers) -> Mapping[str, NormRope]:
        """Our function, and norm and rotation of Transformers' Qwen3: eager, compiled each, compiled together."""
        cos, sin, layout = buffers.cos, buffers.sin, self.work.layout
        wide = [pairing.join(t, t, layout).to(self.work.dtype)[: self.work.seq_len, None] for t in (cos, sin)]

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

        # Without the reset, torch.compile reaches its limit of recompilations.
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # donated buffers forbid a second backward
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        return {
            "ropelab": partial(ropelab.apply_qk_norm_rope, cos=cos, sin=sin, eps=EPS, layout=layout),
            "compiled separate": one_after_the_other(compiled(norms), compiled(rotations)),
            "compiled together": compiled(one_after_the_other(norms, rotations)),
            "eager separate": one_after_the_other(norms, rotations),
        }

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """Heads of q, k and v, their features, and eps, as the operators of engines take them."""
        return self.work.q_heads, self.work.k_heads, self.work.k_heads, self.work.head_dim, EPS

    def vllm(self, buffers: Buffers, weights: Sequence[torch.Tensor]) -> InPlace:
        """vLLM's operator."""
        operator = torch_library.operators("vllm").fused_qk_norm_rope
        cache = torch.cat((buffers.cos, buffers.sin), dim=-1).to(self.work.dtype)
        where = cache, self.work.layout == "split_half", positions(self.work, buffers.q.device, torch.int64)
        return lambda qkv: operator(qkv, *self.sizes, *(w.detach() for w in weights), *where)

    def sglang(self, buffers: Buffers, weights: Sequence[torch.Tensor]) -> InPlace:
        """SGLang's operator, without YaRN."""
        operator, is_neox = torch_library.operators("sglang").fused_qk_norm_rope, self.work.layout == "split_half"
        # The rows of the tables count from the first position; the operator needs the positions themselves.
        own = positions(self.work, buffers.q.device, torch.int32) + self.work.first_position
        where = BASE, is_neox, own, 1.0, 1.0, 1.0, 1.0, self.work.rotary_dim
        return lambda qkv: operator(qkv, *self.sizes, *(w.detach() for w in weights), *where)

    def packed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """A new qkv ``[T, (Hq + 2 Hk) D]`` with q, k and zeros for v."""
        return torch.cat((q, k, torch.zeros_like(k)), dim=2).detach().flatten(0, 1).flatten(1)

    def unpacked(self, run: InPlace, q: torch.Tensor, k: torch.Tensor, *_) -> tuple[torch.Tensor, torch.Tensor]:
        """The new q and k of q and k ``[B, S, H, D]``.

        Raises:
            ValueError: the operator changed v.
        """
        qkv = self.packed(q, k)
        run(qkv)
        heads = qkv.view(*q.shape[:2], -1, self.work.head_dim)
        new_q, new_k, v = heads.split((self.work.q_heads, self.work.k_heads, self.work.k_heads), dim=2)
        if v.count_nonzero():
            raise ValueError("v: expected no change, got other values")
        return new_q, new_k

    def check(self, run, call, step="", backward=True):
        """``"ok"`` if results and gradients agree with float64 within 12 unit roundoffs, else the reason.

        A contender with a separate norm rounds to the dtype of q at most eight times on the way to a result. It rounds
        the norm, the product of the norm and the weight, the tables, and the products and sums of the rotation. A
        rotation increases the error of a pair by at most sqrt(2). The error is therefore at most 12 unit roundoffs,
        relative to the norm of the whole tensor.

        Args:
            backward: whether the contender has another step than the forward.
        """
        buffers, weights = call
        tensors = [x.detach().requires_grad_() for x in (*buffers.inputs, *weights)]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        outputs = run(*tensors)
        found = list(outputs)
        if backward:
            found += torch.autograd.grad(outputs, tensors, buffers.cotangents)
        normed = [
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w
            for x, w in zip(exact[:2], exact[2:], strict=True)
        ]
        truth = [reference.rotate(x, buffers.cos, buffers.sin, layout=self.work.layout) for x in normed]
        truth += torch.autograd.grad(truth, exact, [g.double() for g in buffers.cotangents])
        names = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")
        for name, y, right in zip(names, found, truth, strict=False):
            error = ((y.double() - right).norm() / right.norm()).item()
            if not error <= 12 * torch.finfo(self.work.dtype).eps / 2:
                return f"wrong: {name} has relative error {error:.3g}"
        return "ok"

    def calls(self, run, sets, step=""):
        """One call for each set of buffers. For the step "backward", this function runs the forward."""
        if step == "forward":
            return [partial(run, *b.inputs, *weights) for b, weights in sets]

        def gradients(b: Buffers, weights: Sequence[torch.Tensor], outputs=None):
            outputs, keep = (run(*b.inputs, *weights), False) if outputs is None else (outputs, True)
            return torch.autograd.grad(outputs, (*b.inputs, *weights), b.cotangents, retain_graph=keep)

        if step == "backward":
            return [partial(gradients, *call, run(*call[0].inputs, *call[1])) for call in sets]
        return [partial(gradients, *call) for call in sets]

    def to_copy(self, call, step=""):
        return call[0].inputs
