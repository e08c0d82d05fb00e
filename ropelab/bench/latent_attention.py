"""Measure the heads of multi-head latent attention in training, with Megatron-LM's kernels and with ours.

Megatron-LM has two functions. The first rotates the last 64 of the 192 features of every head of q in place, and its
backward overwrites the gradient. The second rotates the k that all heads share, puts it beside the rest of k in every
head, and splits v off. Both read adjacent pairs and write halves. (Facts from the docstrings of megatron-core 0.16.1.)
A v that stays a view of the projection needs no pass over memory; Megatron-LM's function has no such v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.bench import packages, same_places
from ropelab.bench.agreement import disagreement
from ropelab.bench.operation import PUBLISHED, Contender, Operation, table
from ropelab.bench.peers import megatron
from ropelab.bench.workloads import DIRECTIONS
from ropelab.layout import pairing

OURS, SEPARATE, MEGATRON = "ropelab", "ropelab, separate launches", "Megatron-LM"
"""OURS are `ropelab.assemble_mla_kv` and `ropelab.rotate_mla_query` in place. SEPARATE are `ropelab.apply_rope` to a
new q, and `ropelab.apply_rope` of k_pe with cat and a copy of torch."""
VIEW = "k, v as a view"
PARTS = ("q", "k and v", VIEW)
"""Megatron-LM has functions for the first two. In the last one, v is a view of kv, without a copy."""
FORMATS = ("sbhd", "thd")
SIZES = {"sbhd": ((128, 4096), (128, 16384), (16, 4096), (16, 16384)), "thd": ((128, 4096),)}
"""The numbers of heads and of tokens, for each format."""
ROUNDINGS = 3
"""The error of a rotated head that is allowed, in unit roundoffs, relative to the norm of the head. The result of a
rotation is rounded once, and the gradient of the shared k also after the sum over the heads. The third roundoff is for
the float32 arithmetic."""

Function = Callable[..., Sequence[torch.Tensor]]
"""A differentiable function of the inputs of a part that returns its results."""


@dataclass(frozen=True)
class Latent(Operation):
    """A training step of multi-head latent attention, by default with the sizes of DeepSeek-V3.

    Attributes:
        seq_format: "sbhd" with one sequence of ``tokens``, or "thd" with sequences of ``length``.
        tokens, heads: the sizes.
        length: tokens of a packed sequence.
        dtype: the dtype of all tensors but the tables.
        nope_dim, rotary_dim, value_dim: the features of a head of k that do not rotate, of k that rotate, and of v.
        part: one of `PARTS`.
        seed: of the tensors.
    """

    seq_format: str
    tokens: int = 4096
    heads: int = 128
    length: int = 256
    nope_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    part: str = "q"
    seed: int = 0

    steps = DIRECTIONS
    step_column = "direction"
    of_contenders = PUBLISHED
    differentiates = True

    @property
    def columns(self):
        return self.sizes | {"part": self.part}

    @property
    def description(self):
        return f"{self.part}, {self.seq_format} {self.heads} {self.tokens}"

    @property
    def sizes(self) -> dict[str, object]:
        """The columns that the parts share."""
        names = ("seq_format", "tokens", "heads", "nope_dim", "rotary_dim", "value_dim")
        sizes = {name: getattr(self, name) for name in names}
        return sizes | {"sequences": len(self.cu_seqlens("cpu")) - 1, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def count(self) -> int:
        """The sets of tensors that take turns: one where a set is many times larger than the cache of a GPU."""
        return 1 if self.tokens * self.heads >= 2**20 else 2

    @property
    def checked(self):
        """The first tokens of this one."""
        return replace(self, tokens=min(self.tokens, 1024), seed=1)

    def sets(self, device):
        """Each has ``inputs``, ``cotangents``, and for each direction a tensor to copy: see `must_move`."""
        draw = self.normal(device)
        sets = [{"inputs": self.inputs(draw), "cotangents": self.cotangents(draw)} for _ in range(self.count)]
        for direction in DIRECTIONS:
            for call in sets:
                call[direction] = [self.must_move(direction, draw)]
        return sets

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """int32 ``[n + 1]``: the boundaries of the sequences."""
        step = self.tokens if self.seq_format == "sbhd" else self.length
        return torch.arange(0, self.tokens + 1, step, dtype=torch.int32, device=device)

    def normal(self, device: torch.device | str) -> Callable[..., torch.Tensor]:
        """A function of a shape that draws normally distributed numbers."""
        generator = torch.Generator(device).manual_seed(self.seed)
        return lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

    def inputs(self, draw: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """q ``[S, B, H, nope + R]``; or kv ``[S, B, H, nope + V]`` and k_pe ``[S, B, 1, R]``; without B for thd."""
        shape = (self.tokens, 1) if self.seq_format == "sbhd" else (self.tokens,)
        if self.part == "q":
            return [draw(*shape, self.heads, self.nope_dim + self.rotary_dim)]
        return [draw(*shape, self.heads, self.nope_dim + self.value_dim), draw(*shape, 1, self.rotary_dim)]

    def cotangents(self, draw: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of q; or the gradients of key ``[S, B, H, nope + R]`` and value ``[S, B, H, V]``."""
        shape = (self.tokens, 1) if self.seq_format == "sbhd" else (self.tokens,)
        grads = [draw(*shape, self.heads, self.nope_dim + self.rotary_dim)]
        return grads if self.part == "q" else [*grads, draw(*shape, self.heads, self.value_dim)]

    def must_move(self, direction: str, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
        """A tensor whose copy reads and writes as many bytes as the part must read and write, without tables.

        The part of q must read and write the features that rotate. The part of k and v must read kv and k_pe, and write
        the key and the value; the backward must read and write the same numbers the other way. Where v is a view, the
        forward neither reads nor writes it.
        """
        if self.part == "q":
            return draw(self.tokens, self.heads * self.rotary_dim)
        value_dim = 0 if (self.part, direction) == (VIEW, "forward") else self.value_dim
        half = self.rotary_dim // 2  # of the k_pe of a token, and of what a head of the key has beyond kv
        return draw(self.tokens, self.heads * (self.nope_dim + value_dim + half) + half)

    def to_copy(self, call, step):
        return call[step]

    def places(self, call, step):
        """The features of every head of q that rotate."""
        q = call["inputs"][0]
        return [same_places.in_place(q, self.nope_dim, self.rotary_dim)] if self.part == "q" else ()

    def calls(self, run, sets, step):
        """One call for each set. For the backward, this function runs the forward."""
        if step == "forward":
            return [partial(run, *call["inputs"]) for call in sets]
        calls = []
        for call in sets:
            leaves = [x.detach().clone().requires_grad_() for x in call["inputs"]]
            calls.append(partial(torch.autograd.grad, run(*leaves), leaves, call["cotangents"], retain_graph=True))
        return calls

    def check(self, run, call, step=""):
        """``"ok"`` if results and gradients agree with float64."""
        inputs, cotangents = call["inputs"], call["cotangents"]
        # Megatron-LM's functions overwrite q and the gradient of q.
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = run(*leaves)
        gradients = torch.autograd.grad(results, leaves, [g.clone() for g in cotangents])
        found = self.named([y.detach() for y in results], gradients)
        return disagreement(found, self.right(inputs, cotangents), ROUNDINGS)

    def contenders(self, sets, device):
        found: dict[str, Contender] = {
            OURS: Contender(self.ours(device)), SEPARATE: Contender(self.separate(device)),
        }  # fmt: skip
        if self.part == VIEW:
            return found
        try:
            version, _ = packages.locate(megatron.PACKAGE)
            about = {"version": version, "sha256": megatron.sha256(version)}
            return found | {MEGATRON: Contender(self.theirs(device), about)}
        except packages.NotInstalled as error:
            return found | {MEGATRON: Contender(f"not run: {error}")}

    def tables(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Cosines and sines ``[tokens, R/2]``."""
        return list(ropelab.rotary_table(self.tokens, self.rotary_dim, dtype=dtype, device=device))

    def where(self, device: torch.device | str) -> dict[str, Any]:
        """The arguments of a rotation that say where the tokens are."""
        if self.seq_format == "sbhd":
            return {"seq_format": "sbhd"}
        packed = ropelab.PackedSequences(self.cu_seqlens(device), self.tokens)
        return {"seq_format": "thd", "positions": packed.positions}

    def right(self, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results and gradients: rotated tensors in float64, and moved tensors as they are."""
        cos, sin = self.tables(inputs[0].device, torch.float64)
        where = {"cos": cos, "sin": sin} | self.where(inputs[0].device)
        grad_kept, grad_turned = cotangents[0].split((self.nope_dim, self.rotary_dim), dim=-1)
        turned = inputs[0][..., self.nope_dim :] if self.part == "q" else inputs[1]
        result = reference.rotate(turned, layout="interleaved", out_layout="split_half", **where)
        summed = grad_turned.double() if self.part == "q" else grad_turned.double().sum(-2, keepdim=True)
        gradient = reference.rotate(summed, layout="split_half", out_layout="interleaved", inverse=True, **where)
        found = {"rotated": result.expand(grad_turned.shape), "gradient of the rotated": gradient}
        if self.part == "q":
            return found | {"kept": inputs[0][..., : self.nope_dim], "gradient of the kept": grad_kept}
        k, v = inputs[0].split((self.nope_dim, self.value_dim), dim=-1)
        moved = {"kept": k, "v": v, "gradient of the kept": grad_kept, "gradient of v": cotangents[1]}
        return found | moved

    def named(self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results and gradients of a function by the names that `right` has."""
        kept, rotated = results[0].split((self.nope_dim, self.rotary_dim), dim=-1)
        if self.part == "q":
            grad_kept, grad_rotated = gradients[0].split((self.nope_dim, self.rotary_dim), dim=-1)
            moved = {"kept": kept, "gradient of the kept": grad_kept}
        else:
            grad_kept, grad_v = gradients[0].split((self.nope_dim, self.value_dim), dim=-1)
            moved = {"kept": kept, "v": results[1], "gradient of the kept": grad_kept, "gradient of v": grad_v}
            grad_rotated = gradients[1]
        return moved | {"rotated": rotated, "gradient of the rotated": grad_rotated}

    def options(self, device: torch.device | str) -> dict[str, Any]:
        """The arguments that our functions share."""
        cos, sin = self.tables(device)
        return {"cos": cos, "sin": sin, "layout": "interleaved", "out_layout": "split_half", **self.where(device)}

    def ours(self, device: torch.device | str) -> Function:
        """Our function of the part in one launch; q is overwritten, and so is the gradient of the query."""
        options = self.options(device)
        if self.part == "q":
            where = options | {"inplace": True, "consume": True}
            return lambda q: [ropelab.rotate_mla_query(q, self.nope_dim, **where)]
        options["copy_value"] = self.part != VIEW
        return lambda kv, k_pe: ropelab.assemble_mla_kv(kv, k_pe, self.nope_dim, **options)

    def separate(self, device: torch.device | str) -> Function:
        """Our rotation in one launch; for the key also cat, and for a v that is no view a copy of torch."""
        options = self.options(device)
        if self.part == "q":
            rotary_slice = (self.nope_dim, self.nope_dim + self.rotary_dim)
            return lambda q: [ropelab.apply_rope(q, rotary_slice=rotary_slice, **options)]

        def function(kv, k_pe):
            k, v = kv.split((self.nope_dim, self.value_dim), dim=-1)
            k_pe = ropelab.apply_rope(k_pe, **options).expand(*k.shape[:-1], self.rotary_dim)
            return [torch.cat((k, k_pe), dim=-1), v if self.part == VIEW else v.contiguous()]

        return function

    def theirs(self, device: torch.device | str) -> Function:
        """Megatron-LM's function of the part.

        Raises:
            NotInstalled: Megatron-LM's file is not there, or cannot be imported.
        """
        module = megatron.kernels()
        cos, sin = (pairing.join(t, t, "split_half")[:, None, None].contiguous() for t in self.tables(device))
        packed = self.cu_seqlens(device) if self.seq_format == "thd" else None
        if self.part == "q":
            sizes = (self.nope_dim, self.rotary_dim)
            return lambda q: [module.fused_apply_mla_rope_for_q(q, cos, sin, *sizes, packed)]
        sizes = (self.rotary_dim, self.nope_dim, self.value_dim)
        return lambda kv, k_pe: module.fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, *sizes, packed)


def latent_attention(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time all parts, dense and packed, forward and backward.

    Columns: seq_format, tokens, heads, nope_dim, rotary_dim, value_dim, sequences, dtype, part, direction, and those of
        `operation.compare`. The copy moves the bytes that must move: see `must_move`. The copy to the same places
        copies the features of q that rotate.
    """
    cases = [
        Latent(fmt, heads=heads, tokens=256 if smoke else tokens, part=part)
        for fmt in FORMATS for heads, tokens in SIZES[fmt] for part in PARTS
    ]  # fmt: skip
    return table(cases[-2:] if smoke else cases, rounds=3 if smoke else 15, device=device, parts=len(PARTS))
