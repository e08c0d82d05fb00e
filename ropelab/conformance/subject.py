"""An implementation and all that was declared of it, callable in canonical terms, with the truth and its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import grad

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.tables import rotary_table
from ropelab.conformance.bounds import (
    EXACT,
    NO_ROUNDING,
    Arithmetic,
    Rounding,
    exact,
    rotate_exactly,
    rotation_bound,
    table_angle_error,
)
from ropelab.conformance.case import Broken, Case, NotApplicable, Sizes
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import pairs, permutation
from ropelab.layout.seq_format import from_bshd

if TYPE_CHECKING:
    from ropelab.conformance.conventions import Arguments, Convention

Tensors = tuple[torch.Tensor, ...]
FLOAT32 = Rounding.nearest(torch.float32).unit


@dataclass(frozen=True)
class Subject:
    """A function under test.

    ``subject(case)`` translates the case into the function's convention, calls it, and translates back: the result
    is ``[B, S, H, D]`` again, one tensor for each of ``case.inputs``, with autograd's graph.

    Attributes:
        function: as its author wrote it.
        convention: how to call it.
        layout, out_layout: of the features, read and written.
        seq_format: order of the axes that the function sees.
        reversed: declared to rotate by minus the angle.
        in_place: the result overwrites the inputs.
        narrow: every operation is rounded to the inputs' dtype, tables too; otherwise maths in float32 or wider.
        once: declared to be differentiable once only.
        base: of the frequencies.
        device, dtype: of the tensors of most laws.
        state: what the convention keeps between calls (an instance of a module).
        surroundings: the global state that the function made for itself, kept apart from that of the laws.
    """

    function: Callable[..., Any]
    convention: Convention
    layout: str = "split_half"
    out_layout: str = "split_half"
    seq_format: str = "bshd"
    reversed: bool = False
    in_place: bool = False
    narrow: bool = False
    once: bool = False
    base: float = 10000.0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    state: dict[str, Any] = field(default_factory=dict, compare=False)
    surroundings: Surroundings = field(default_factory=Surroundings, compare=False, repr=False)

    # ------------------------------------------------------------------------------------------- calling it

    def draw(self, sizes: Sizes, *, dtype: torch.dtype | None = None, seed: int = 0, **where) -> Case:
        """A case of standard normal numbers, contiguous in the function's own format; ``where`` as for `Case`.

        The case has q and k for a convention that rotates both, x for one of a single tensor.
        """
        heads = (sizes.q_heads, sizes.k_heads) if self.convention.pair else (sizes.q_heads,)
        case = Case((torch.empty(sizes.batch, sizes.tokens, 1, 1),), sizes.rotary_dim, **where)
        shapes = [(sizes.batch, sizes.tokens, h, sizes.head_dim) for h in heads]
        return replace(case, inputs=self.normal(shapes, self.format(case), dtype or self.dtype, seed))

    def cotangents(self, case: Case, seed: int = 1) -> Case:
        """The case with random cotangents, contiguous as the inputs of ``draw`` are."""
        shapes = [x.shape for x in case.inputs]
        return replace(case, cotangents=self.normal(shapes, self.format(case), case.inputs[0].dtype, seed))

    def normal(self, shapes: Sequence, seq_format: str, dtype: torch.dtype, seed: int) -> Tensors:
        """Standard normal ``[B, S, H, D]`` views of memory that is contiguous in ``seq_format``."""
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes)
        return tuple(contiguous_as(x.to(dtype), seq_format).to(self.device) for x in drawn)

    def format(self, case: Case) -> str:
        """The function's format for the case: packed documents are ``thd``."""
        return "thd" if case.lengths is not None else self.seq_format

    def __call__(self, case: Case) -> Tensors:
        """The outputs, ``[B, S, H, D]`` each. Inputs survive: a function that works in place gets copies.

        Results survive as well, whatever buffers the function uses again in its next call.

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
        """Whether the convention, and this function, can express the case."""
        try:
            self.arguments(case)
        except NotApplicable:
            return False
        return True

    def arguments(self, case: Case) -> Arguments:
        """The case in the function's convention.

        Raises:
            NotApplicable: it cannot be expressed.
        """
        return self.convention.translate(self, case)

    def call(self, case: Case, arguments: Arguments) -> Tensors:
        """Call the function as it is, on these very tensors, and bring the outputs into canonical form.

        Raises:
            NotApplicable: the function raised NotImplementedError.
            Broken: it returned something else than the convention says.
        """
        try:
            with self.surroundings.theirs():
                function = self.convention.callable(self, case)
                returned = function(*arguments.positional, **arguments.keywords)
        except NotImplementedError as reason:
            raise NotApplicable(f"the function says that it does not do this: {reason}") from reason
        outputs = self.convention.outputs(self, case, returned, arguments)
        for x, y in zip(case.inputs, outputs, strict=True):
            if y.shape != x.shape:
                raise Broken(f"expected a result of shape {tuple(x.shape)} ([B, S, H, D]), got {tuple(y.shape)}")
        return outputs

    def gradients(self, case: Case, **options) -> tuple[Tensors, Tensors]:
        """Outputs, and the gradients that ``case.cotangents`` give the inputs; zeros where none arrives.

        Args:
            options: of ``torch.autograd.grad``.

        Raises:
            NotApplicable: as for a call, or the convention knows no gradients.
            Broken: autograd has not seen the function.
        """
        self.require_gradients()
        inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
        outputs = self(replace(case, inputs=inputs))
        if not all(y.requires_grad for y in outputs):
            raise Broken("the output has no grad_fn: autograd has not seen the function, its inputs get no gradient")
        cotangents = tuple(map(copied, case.cotangents))  # a faulty backward may write to them
        with self.surroundings.theirs():  # a backward may be the function's own
            found = grad(outputs, inputs, cotangents, allow_unused=True, **options)
        return outputs, tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))

    def with_inputs(self, case: Case, inputs: Sequence[torch.Tensor]) -> Case:
        """The case with other inputs, contiguous in the function's format."""
        return replace(case, inputs=tuple(contiguous_as(x, self.format(case)) for x in inputs))

    def require_gradients(self) -> None:
        """Raise NotApplicable if the convention knows no gradients."""
        if not self.convention.differentiable:
            raise NotApplicable(f"{self.convention.name}: made for inference, in place and unseen by autograd")

    def require_pair(self) -> None:
        """Raise NotApplicable unless the function takes q and k together."""
        if not self.convention.pair:
            raise NotApplicable(f"{self.convention.name}: rotates one tensor at a time")

    def as_input(self, y: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """An output with its features in the order in which the function reads them."""
        if self.out_layout == self.layout:
            return y
        order = permutation(rotary_dim, self.out_layout, self.layout).to(y.device)
        return torch.cat((y[..., order], y[..., rotary_dim:]), dim=-1)

    # -------------------------------------------------------------------------------------------- the truth

    def angles(self, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """float64 ``[..., R/2]`` in rad, standard sign, of positions ``[...]``; 0 without a position."""
        positions = positions.cpu().double().masked_fill(positions.cpu() == NO_POSITION, 0)
        return positions[..., None] * inverse_frequencies(rotary_dim, self.base)

    def tables(self, case: Case, positions: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin ``[..., R/2]`` of positions ``[...]``, or of all below a number, as the function wants them."""
        dtype = case.inputs[0].dtype
        dtype = dtype if self.narrow else torch.promote_types(dtype, torch.float32)
        if isinstance(positions, int):
            cos, sin = _table(positions, case.rotary_dim, self.base, case.factor, dtype, self.device)
            return cos.clone(), sin.clone()  # somebody may write to them
        angles = self.angles(positions, case.rotary_dim)
        cos, sin = ((case.factor * t).to(self.device, dtype) for t in (angles.cos(), angles.sin()))
        return cos, sin

    def expected(
        self, case: Case, inputs: Sequence[torch.Tensor | np.ndarray] | None = None, *, transposed: bool = False
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The definition in extended precision, and how far rounding may take a right function from it.

        Args:
            inputs: to rotate instead of ``case.inputs``, at the same positions.
            transposed: apply the transposed matrices, as the gradient does to cotangents.

        Returns:
            For each input ``(y, bound)``, ``[B, S, H, D]``. Features that do not rotate have bound 0; tokens without
            a position are zeros.
        """
        inputs = case.inputs if inputs is None else inputs
        c, s, angle_error = self._cosines(case)
        s = -s if transposed else s
        source, target = (self.layout, self.out_layout)[:: -1 if transposed else 1]
        arithmetic = self.arithmetic(case.inputs[0].dtype)
        nowhere = (case.token_positions() == NO_POSITION).numpy()
        found = []
        for x in inputs:
            x = exact(x) if isinstance(x, torch.Tensor) else x
            pair = pairs(x[..., : case.rotary_dim], source)
            y, bound = x.copy(), np.zeros_like(x)
            _fill(y, case.rotary_dim, target, rotate_exactly(*pair, c, s))
            _fill(bound, case.rotary_dim, target, rotation_bound(*pair, c, s, arithmetic, angle_error))
            y[nowhere] = bound[nowhere] = 0
            found.append((y, bound))
        return found

    def arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """The roundings that a right function may make.

        The result of an operation in 16 bits may be off by an ulp rather than half of one: Triton's interpreter
        truncates bfloat16. A cosine that the function computes is off by an ulp of float32, in libraries of the day.
        """
        wide = torch.promote_types(dtype, torch.float32)
        kept = dtype if self.narrow else wide
        compute = Rounding.truncating(kept) if kept != wide else Rounding.nearest(kept)
        store = NO_ROUNDING if kept == dtype else Rounding.truncating(dtype)
        table = Rounding.nearest(kept)
        if self.convention.computes_cosines:
            table = Rounding(table.unit + 2 * FLOAT32, table.underflow)
        return Arithmetic(table, compute, store)

    def _cosines(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """cos and sin ``[B, S, 1, R/2]`` as meant, and the error (rad) of the angles that the convention implies."""
        positions = case.token_positions().numpy().astype(EXACT)
        positions[positions == NO_POSITION] = 0
        frequencies = exact(inverse_frequencies(case.rotary_dim, self.base))
        angles = positions[..., None, None] * frequencies
        turn = -angles if case.inverse != self.reversed else angles
        error = table_angle_error(angles) + self.convention.angle_error(angles, frequencies)
        return case.factor * np.cos(turn), case.factor * np.sin(turn), case.factor * error


@lru_cache(4)
def _table(
    rows: int, rotary_dim: int, base: float, factor: float, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[rows, R/2]``, rounded once; kept, as those of a million rows take a while."""
    tables = rotary_table(rows, rotary_dim, base, dtype=torch.float64)
    cos, sin = ((factor * table).to(device, dtype) for table in tables)
    return cos, sin


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as ``x`` does, gaps and all; what is expanded stays so. Differentiable."""
    kept = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    memory = torch.empty_strided(kept.shape, kept.stride(), dtype=x.dtype, device=x.device)
    return memory.copy_(kept).expand(x.shape)


def contiguous_as(x: torch.Tensor, seq_format: str) -> torch.Tensor:
    """``[B, S, H, D]`` (packed: one row) over memory that is contiguous in ``seq_format``."""
    if seq_format == "thd":
        return x.clone(memory_format=torch.contiguous_format)
    # A clone, as ``contiguous`` keeps what strides an axis of size 1 had. Each swap is its own inverse.
    return from_bshd(from_bshd(x, seq_format).clone(memory_format=torch.contiguous_format), seq_format)


def _fill(x: np.ndarray, rotary_dim: int, layout: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Overwrite the rotated features, pair by pair."""
    for features, values in zip(pairs(x[..., :rotary_dim], layout), pair, strict=True):
        features[...] = values
