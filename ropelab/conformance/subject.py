"""The subject of a test: a function that takes cases, next to the exact results and their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.autograd import grad

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import (
    EXACT,
    FLOAT32_UNIT,
    NO_ROUNDING,
    Arithmetic,
    Rounding,
    exact,
    rotate_exactly,
    rotation_bound,
    table_angle_error,
)
from ropelab.conformance.case import Broken, Case, NotApplicable, Sizes
from ropelab.conformance.convention import Arguments, Convention, call, check_tensor
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.tensors import Tensors, contiguous_as, copied
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import pairs, permutation


@dataclass(frozen=True)
class Subject(Implementation):
    """An implementation with the convention by which it is called.

    ``subject(case)`` translates the case into the function's convention, calls the function, and translates its
    results back: tensors ``[B, S, H, D]``, one for each of ``case.inputs``, with autograd's graph.

    Attributes:
        convention: how to call the function. `Implementation` describes the other attributes.
    """

    convention: Convention

    # ---------------------------------------------------------------------------------- how the function is called

    def draw(self, sizes: Sizes, *, dtype: torch.dtype | None = None, seed: int = 0, **where) -> Case:
        """Return a case of standard normal numbers, contiguous in the function's own format.

        Args:
            sizes: the extents of the inputs: q and k if the convention rotates both in a call, else x.
            dtype: the dtype of the inputs, by default the subject's.
            seed: two cases of one seed and one size have the same numbers.
            where: other attributes of the `Case`.
        """
        heads = (sizes.q_heads, sizes.k_heads) if self.convention.pair else (sizes.q_heads,)
        case = Case((torch.empty(sizes.batch, sizes.tokens, 1, 1),), sizes.rotary_dim, **where)
        shapes = [(sizes.batch, sizes.tokens, h, sizes.head_dim) for h in heads]
        return replace(case, inputs=self.normal(shapes, self.format(case), dtype or self.dtype, seed))

    def cotangents(self, case: Case, seed: int = 1) -> Case:
        """Return the case with random cotangents, contiguous like the inputs that ``draw`` returns."""
        shapes = [x.shape for x in case.inputs]
        return replace(case, cotangents=self.normal(shapes, self.format(case), case.inputs[0].dtype, seed))

    def normal(self, shapes: Sequence, seq_format: str, dtype: torch.dtype, seed: int) -> Tensors:
        """Return standard normal tensors of shapes ``[B, S, H, D]`` in memory that is contiguous in ``seq_format``."""
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes)
        return tuple(contiguous_as(x.to(dtype), seq_format).to(self.device) for x in drawn)

    def __call__(self, case: Case) -> Tensors:
        """Return the outputs, ``[B, S, H, D]`` each.

        The inputs survive, because a function that works in place gets copies. The outputs survive, too, even if the
        next call of the function reuses their memory.

        Raises:
            NotApplicable, Broken: as for ``arguments`` and ``call``.
        """
        if len(case.inputs) == 2 and not self.convention.pair:
            return tuple(self(replace(case, inputs=(x,)))[0] for x in case.inputs)
        if self.in_place:
            case = replace(case, inputs=tuple(map(copied, case.inputs)))
        outputs = self.call(case, self.arguments(case))
        return outputs if self.in_place else tuple(y.clone() for y in outputs)

    def can(self, case: Case) -> bool:
        """Return whether the convention and this function can express the case."""
        try:
            self.arguments(case)
        except NotApplicable:
            return False
        return True

    def arguments(self, case: Case) -> Arguments:
        """Return the arguments of the case in the function's convention.

        Raises:
            NotApplicable: the convention or this function cannot express the case.
        """
        return self.convention.translate(self, case)

    def call(self, case: Case, arguments: Arguments) -> Tensors:
        """Call the function on these very tensors, without copies, and return its outputs as ``[B, S, H, D]``.

        Raises:
            NotApplicable: the function does not take these arguments, or it raised NotImplementedError.
            Broken: the function returned something else than the convention says.
        """
        with self.surroundings.theirs():
            returned = call(self.convention.callable(self, case), arguments, self.convention.signature)
        self.surroundings.returned = True
        outputs = self.convention.outputs(self, case, returned, arguments)
        for x, y in zip(case.inputs, outputs, strict=True):
            if y.shape != x.shape:
                raise Broken(f"a result has shape {tuple(y.shape)}, expected {tuple(x.shape)} ([B, S, H, D])")
            check_tensor("a result", y, x.device)
        return outputs

    def gradients(self, case: Case, **options) -> tuple[Tensors, Tensors]:
        """Return the outputs, and the gradients of the inputs for ``case.cotangents``; zeros where none arrives.

        Args:
            case: the call, with cotangents.
            options: arguments for ``torch.autograd.grad``.

        Raises:
            NotApplicable: as for a call; or the convention has no gradients.
            Broken: autograd has no record of the function.
        """
        self.require_gradients()
        inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
        outputs = self(replace(case, inputs=inputs))
        made = [(y, copied(g)) for y, g in zip(outputs, case.cotangents, strict=True) if y.requires_grad]
        if not made:
            raise Broken("the output has no grad_fn: autograd has no record of the function, and no gradient arrives")
        ys, cotangents = zip(*made, strict=True)  # copies, because a faulty backward may overwrite cotangents
        with self.surroundings.theirs():  # the backward may be code of the function's author
            found = grad(ys, inputs, cotangents, allow_unused=True, **options)
        return outputs, tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))

    def cotangents_after(self, case: Case) -> Tensors:
        """Return copies of the cotangents as a backward leaves them.

        Raises:
            NotApplicable: as for `gradients`; or a result has no gradient.
        """
        self.require_gradients()
        inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
        outputs = self(replace(case, inputs=inputs))
        if not all(y.requires_grad for y in outputs):
            raise NotApplicable("a result has no gradient")
        given = tuple(map(copied, case.cotangents))
        with self.surroundings.theirs():
            grad(outputs, inputs, given, allow_unused=True)
        return given

    def with_inputs(self, case: Case, inputs: Sequence[torch.Tensor]) -> Case:
        """Return the case with other inputs ``[B, S, H, D]``, copied so that they are contiguous in its format."""
        return replace(case, inputs=tuple(contiguous_as(x, self.format(case)) for x in inputs))

    def require_gradients(self) -> None:
        """Raise NotApplicable if the convention has no gradients."""
        if not self.convention.differentiable:
            raise NotApplicable(f"{self.convention.name}: made for inference, in place and unseen by autograd")

    def require_pair(self) -> None:
        """Raise NotApplicable unless the function takes q and k together."""
        if not self.convention.pair:
            raise NotApplicable(f"{self.convention.name}: rotates one tensor at a time")

    def as_input(self, y: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """Return an output ``[..., D]`` with its features in the order in which the function reads them."""
        if self.out_layout == self.layout:
            return y
        order = permutation(rotary_dim, self.out_layout, self.layout).to(y.device)
        return torch.cat((y[..., order], y[..., rotary_dim:]), dim=-1)

    # ----------------------------------------------------------------------------------------- the exact results

    def expected(
        self, case: Case, inputs: Sequence[torch.Tensor | np.ndarray] | None = None, *, transposed: bool = False
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the definition in extended precision, and how far rounding may take a right function from it.

        Args:
            case: the call.
            inputs: the tensors to rotate at the positions of the case, by default ``case.inputs``.
            transposed: apply the transposed matrices, as the gradient does to cotangents.

        Returns:
            ``(y, bound)`` for each input, ``[B, S, H, D]`` each. The bound is 0 for features that do not rotate; both
            are 0 for tokens without a position.
        """
        inputs = case.inputs if inputs is None else inputs
        c, s, angle_error = self.cosines(case)
        s = -s if transposed else s
        source, target = (self.layout, self.out_layout)[:: -1 if transposed else 1]
        arithmetic = self.arithmetic(case.inputs[0].dtype)
        nowhere = (case.token_positions() == NO_POSITION).numpy()
        found = []
        for x in inputs:
            x = exact(x) if isinstance(x, torch.Tensor) else x
            pair = pairs(x[..., : case.rotary_dim], source)
            y, bound = x.copy(), np.zeros_like(x)
            fill(y, case.rotary_dim, target, rotate_exactly(*pair, c, s))
            fill(bound, case.rotary_dim, target, rotation_bound(*pair, c, s, arithmetic, angle_error))
            y[nowhere] = bound[nowhere] = 0
            found.append((y, bound))
        return found

    def arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """Return the roundings that a right function may make on tensors of ``dtype``.

        An operation in 16 bits may be off by a unit in the last place rather than half a unit, because Triton's
        interpreter truncates bfloat16. A cosine that the function computes may be off by another unit in the last place
        of float32, as in today's libraries.
        """
        wide = torch.promote_types(dtype, torch.float32)
        kept = dtype if self.rounds_operations else wide
        compute = Rounding.truncating(kept) if kept != wide else Rounding.nearest(kept)
        store = NO_ROUNDING if kept == dtype else Rounding.truncating(dtype)
        table = Rounding.nearest(kept)
        if self.convention.computes_cosines:
            table = Rounding(table.unit + 2 * FLOAT32_UNIT, table.underflow)
        return Arithmetic(table, compute, store)

    def cosines(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return exact cos and sin ``[B, S, 1, R/2]``, and the error of each that the convention's angles imply."""
        positions = case.pair_positions().numpy().astype(EXACT)
        positions[positions == NO_POSITION] = 0
        positions = positions / case.interpolation
        given = self.frequencies
        frequencies = exact(inverse_frequencies(case.rotary_dim, self.base) if given is None else given)
        angles = positions[:, :, None] * frequencies
        signed = -angles if case.inverse != self.reversed else angles
        error = table_angle_error(angles) + self.convention.angle_error(angles, frequencies)
        return case.factor * np.cos(signed), case.factor * np.sin(signed), case.factor * error


def fill(x: np.ndarray, rotary_dim: int, layout: str, pair: tuple[np.ndarray, ...]) -> None:
    """Overwrite the features that rotate with the two members of each pair."""
    for features, values in zip(pairs(x[..., :rotary_dim], layout), pair, strict=True):
        features[...] = values
