"""This file holds fairseq2's rotary encoders with a choice of the layout (fairseq2#1213), and one over the kernel.

The call of every encoder is ``encoder(seqs, seqs_layout, *, state_bag=None)``. The encoders compute in float32 and cast
the result to the dtype of ``seqs``; only `KernelRotaryEncoder` computes float64 in float64. ``impl`` names the layout
of the features: ``"llama"`` rotates adjacent pairs, ``"reference"`` rotates the two halves.

- `RotaryEncoder` multiplies complex numbers, which are adjacent pairs. For halves it reorders the features before and
  after.
- `ReferenceRotaryEncoder` computes ``x cos + turned(x) sin``, where only ``turned`` depends on the layout.
- `KernelRotaryEncoder` calls `ropelab.apply_rope`.

The contract comes from fairseq2 0.8.1 (``fairseq2.nn.position_encoder``). ``impl`` and the ways of reordering come from
the pull request. The encoders take fairseq2's own ``BatchLayout`` and ``IncrementalStateBag``, and all objects with the
attributes of `SeqsLayout` and `StateBag`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self

import torch

from ropelab import NO_POSITION, apply_rope
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.tables import MOST_ROWS, frequency_tables
from ropelab.arguments import (
    DTYPES,
    POSITION_DTYPES,
    check_tensor,
    choice,
    flag,
    integer,
    integers,
    number,
    shown,
    tensor,
)
from ropelab.arguments import device as usable
from ropelab.interop.refusals import renamed
from ropelab.layout.pairing import check_rotary_dim, join, pairs

Impl = Literal["llama", "reference"]
LAYOUTS = {"llama": "interleaved", "reference": "split_half"}
"""``impl`` -> ropelab's name of the layout."""


class SeqsLayout(Protocol):
    """A description of the elements of a batch that are tokens, and of their positions, such as `BatchLayout`.

    Attributes:
        packed: ``seqs`` is ``[S, *, E]`` with sequences one after another, not ``[N, S, *, E]``.
        padded: some elements of the batch are padding.
        max_seq_len: the length of the longest sequence.
        position_indices: ``[S]`` if packed, else ``[N, S]``; -1 for padding. The encoders read it only if ``packed`` or
            ``padded`` is true.
    """

    packed: bool
    padded: bool
    max_seq_len: int
    position_indices: torch.Tensor


class StateBag(Protocol):
    """The state of a decoder.

    Attributes:
        step_nr: the number of tokens that every sequence has decoded before. The encoders ignore it while training.
    """

    step_nr: int


class BatchLayout:
    """The `SeqsLayout` of sequences with given lengths.

    Args:
        shape: ``(N, S)``, or ``(S,)`` if packed.
        seq_lens: the lengths of the sequences, at least 1 each; by default the full width.
        packed: the sequences lie one after another, and the elements after the last sequence are padding.
        device: the device of ``position_indices``, by default torch's default device.

    Raises:
        TypeError: ``shape`` or ``seq_lens`` are not integers, or ``packed`` is not a bool.
        ValueError: ``shape`` has another rank, or the lengths do not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        *,
        packed: bool = False,
        device: torch.device | str | None = None,
    ):
        shape = integers("shape", shape)
        if len(shape) != (1 if flag("packed", packed) else 2) or min(shape) < 1:
            raise ValueError(f"shape: expected {'(S,)' if packed else '(N, S)'}, got {shape}")
        width = shape[-1]
        lengths = (width,) * (1 if packed else shape[0]) if seq_lens is None else integers("seq_lens", seq_lens)
        if packed:
            fit = sum(lengths) <= width
        else:
            fit = len(lengths) == shape[0] and max(lengths) <= width
        if not fit or min(lengths, default=0) < 1:
            raise ValueError(f"seq_lens: expected lengths >= 1 that fit into shape {shape}, got {list(lengths)}")
        counts = [torch.arange(length, device="cpu") for length in lengths]
        rows = [torch.cat(counts)] if packed else counts
        rows = [torch.nn.functional.pad(row, (0, width - len(row)), value=-1) for row in rows]
        indices = rows[0] if packed else torch.stack(rows)
        self.packed, self.padded = packed, bool((indices < 0).any())
        self.max_seq_len = max(lengths)
        self.position_indices = indices.to(usable("device", device))


class _Encoder(torch.nn.Module):
    """The base of the encoders, with their arguments, their state, and the row of the tables that each token reads.

    The tables are buffers that move with the module, and checkpoints leave them out.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float,
        freqs_init_fn: Callable[[Self], torch.Tensor] | None,
        device: torch.device | str | None,
        impl: Impl,
    ):
        super().__init__()
        encoding_dim = check_rotary_dim(encoding_dim, "encoding_dim")
        max_seq_len, theta = integer("max_seq_len", max_seq_len, 1, MOST_ROWS), number("theta", theta, above=0)
        choice("impl", impl, tuple(LAYOUTS))
        if freqs_init_fn is not None and not callable(freqs_init_fn):
            raise TypeError(f"freqs_init_fn: expected a function of the encoder or None, got {shown(freqs_init_fn)}")
        device = usable("device", device)
        self.encoding_dim, self.max_seq_len, self.theta, self.impl = encoding_dim, max_seq_len, theta, impl
        self.freqs_init_fn: Callable[[Any], torch.Tensor] | None = freqs_init_fn
        for name, shape in self._table_shapes().items():
            self.register_buffer(name, torch.empty(shape, device=device, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, which checkpoints leave out. The encoder has no parameters."""
        self.reset_non_persistent_buffers()

    def reset_non_persistent_buffers(self) -> None:
        """Fill the tables, for instance after ``to_empty``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        return (
            f"encoding_dim={self.encoding_dim}, max_seq_len={self.max_seq_len}, theta={self.theta}, impl={self.impl!r}"
        )

    def _table_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each table, by name."""
        raise NotImplementedError

    def _frequencies(self) -> torch.Tensor | None:
        """The frequencies of ``freqs_init_fn``, ``[E/2]``, or None without such a function."""
        if self.freqs_init_fn is None:
            return None
        found = tensor("freqs_init_fn", self.freqs_init_fn(self))
        check_tensor("freqs_init_fn", found, (1,), f"({self.encoding_dim // 2},)", (torch.float32, torch.float64))
        if found.shape[0] != self.encoding_dim // 2:
            raise ValueError(f"freqs_init_fn: expected {self.encoding_dim // 2} frequencies, got {found.shape[0]}")
        return found

    def _angles(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The angles of the tables, ``[max_seq_len, E/2]``: products of positions and frequencies, in float32."""
        return torch.outer(torch.arange(self.max_seq_len, device=frequencies.device, dtype=torch.float32), frequencies)

    def _first_and_relative_positions(
        self, seqs: torch.Tensor, layout: SeqsLayout, state_bag: StateBag | None
    ) -> tuple[int, int | torch.Tensor]:
        """The position of the first token, and the positions relative to the first token.

        An int ``n`` stands for the relative positions 0 to ``n - 1``. A tensor has the relative position of each token,
        and -1 for padding.
        """
        for name in ("packed", "padded", "max_seq_len"):
            if not hasattr(layout, name):
                raise TypeError(
                    f"seqs_layout: expected the attributes of BatchLayout, got {shown(layout)} without {name}"
                )
        tokens = 1 if layout.packed else 2
        if tensor("seqs", seqs).ndim < 1 + tokens or seqs.shape[-1] != self.encoding_dim:
            expected = f"[{'' if layout.packed else 'N, '}S, *, {self.encoding_dim}]"
            raise ValueError(f"seqs: expected shape {expected}, got {tuple(seqs.shape)}")
        check_tensor("seqs", seqs, (seqs.ndim,), "", DTYPES)
        first = 0
        if not self.training and state_bag is not None:
            if not hasattr(state_bag, "step_nr"):
                raise TypeError(f"state_bag: expected an object with step_nr, or None, got {shown(state_bag)}")
            first = integer("state_bag", state_bag.step_nr, at_least=0)
        everywhere = not (layout.packed or layout.padded)
        end = first + (seqs.shape[tokens - 1] if everywhere else layout.max_seq_len)
        if end > self.max_seq_len:
            raise ValueError(f"seqs: expected positions below max_seq_len = {self.max_seq_len}, got {end - 1}")
        if everywhere:
            return first, end - first
        indices, shape = tensor("seqs_layout", getattr(layout, "position_indices", None)), tuple(seqs.shape[:tokens])
        check_tensor("seqs_layout", indices, (tokens,), f"{shape} of positions", POSITION_DTYPES)
        if indices.shape != seqs.shape[:tokens]:
            raise ValueError(f"seqs_layout: expected positions of shape {shape}, got {tuple(indices.shape)}")
        if indices.device != seqs.device:
            raise ValueError(f"seqs_layout: expected positions on seqs's device {seqs.device}, got {indices.device}")
        return first, indices

    def _rows(self, seqs: torch.Tensor, layout: SeqsLayout, state_bag: StateBag | None) -> slice | torch.Tensor:
        """The rows that the tokens read, in tables whose row 0 serves padding and whose row 1 serves position 0.

        As in fairseq2, padding reads row 0 only while no token has been decoded before.
        """
        first, relative = self._first_and_relative_positions(seqs, layout, state_bag)
        return 1 + first + relative if isinstance(relative, torch.Tensor) else slice(1 + first, 1 + first + relative)


class RotaryEncoder(_Encoder):
    """The rotation as a product of complex numbers.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; even.
        max_seq_len: the number of positions that the table serves.
        theta: the base of the frequencies.
        freqs_init_fn: a function of the encoder that returns other frequencies, ``[E/2]``, rad per position.
        device: the device of the table, by default torch's default device.
        impl: ``"llama"`` for adjacent pairs; ``"reference"`` for halves.

    Attributes:
        freqs: ``[max_seq_len + 1, E/2, 2]``, real and imaginary parts. Row 0 is zero and serves padding, so padding
            becomes zero, or NaN where it was not finite.

    Raises:
        TypeError: a number, ``impl`` or ``freqs_init_fn`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``impl`` is unknown.
    """

    freqs: torch.Tensor

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        freqs_init_fn: Callable[["RotaryEncoder"], torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        impl: Impl = "llama",
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, freqs_init_fn=freqs_init_fn, device=device, impl=impl)

    def reset_non_persistent_buffers(self) -> None:
        """Fill the table, for instance after ``to_empty``."""
        frequencies = self._frequencies()
        if frequencies is None:
            even = torch.arange(0, self.encoding_dim, 2, device=self.freqs.device, dtype=torch.float32)
            frequencies = 1.0 / self.theta ** (even / self.encoding_dim)
        angles = self._angles(frequencies)
        self.freqs[0] = 0.0
        self.freqs[1:] = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))

    def forward(
        self, seqs: torch.Tensor, seqs_layout: SeqsLayout, *, state_bag: StateBag | None = None
    ) -> torch.Tensor:
        """Rotate ``seqs``, ``[N, S, *, E]`` or packed ``[S, *, E]``.

        Returns:
            A tensor of the shape and dtype of ``seqs``, differentiable in ``seqs``.

        Raises:
            TypeError: ``seqs`` is not a floating tensor, or the layout or the state lacks an attribute.
            ValueError: ``seqs`` has another last dimension, a position is beyond the table, or the layout has another
                shape.
        """
        turns = torch.view_as_complex(self.freqs)
        turns = _row_of_each_token(turns, self._rows(seqs, seqs_layout, state_bag), seqs)
        x = seqs
        if self.impl == "reference":
            x = _reordered(x, "split_half", "interleaved")
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        y = torch.view_as_real(z * turns).flatten(-2)
        if self.impl == "reference":
            y = _reordered(y, "interleaved", "split_half")
        return y.type_as(seqs)

    def _table_shapes(self):
        return {"freqs": (self.max_seq_len + 1, self.encoding_dim // 2, 2)}


class ReferenceRotaryEncoder(_Encoder):
    """The rotation as ``x cos + turned(x) sin``, where ``turned`` is a quarter turn of every pair.

    Args:
        encoding_dim, max_seq_len, theta, device: as for `RotaryEncoder`.
        impl: ``"reference"`` for halves; ``"llama"`` for adjacent pairs.

    Attributes:
        cos_freqs, sin_freqs: ``[max_seq_len + 1, E]``, a column for each feature in the order of the layout. They take
            twice the memory of the table of `RotaryEncoder`. Row 0 is zero and serves padding.

    Raises:
        TypeError: a number or ``impl`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``impl`` is unknown.
    """

    cos_freqs: torch.Tensor
    sin_freqs: torch.Tensor

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        device: torch.device | str | None = None,
        impl: Impl = "reference",
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, freqs_init_fn=None, device=device, impl=impl)

    def reset_non_persistent_buffers(self) -> None:
        """Fill the tables, for instance after ``to_empty``."""
        pair = torch.arange(self.encoding_dim // 2, device=self.cos_freqs.device, dtype=torch.float32)
        # The bits differ from RotaryEncoder's frequencies, which are reciprocals of powers.
        angles = self._angles(self.theta ** (-2.0 * pair / self.encoding_dim))
        for table, values in ((self.cos_freqs, angles.cos()), (self.sin_freqs, angles.sin())):
            table[0] = 0.0
            table[1:] = join(values, values, LAYOUTS[self.impl])

    def forward(
        self, seqs: torch.Tensor, seqs_layout: SeqsLayout, *, state_bag: StateBag | None = None
    ) -> torch.Tensor:
        """Rotate ``seqs``; see `RotaryEncoder.forward`."""
        rows = self._rows(seqs, seqs_layout, state_bag)
        # Two statements, because torch 2.11 compiles a comprehension for this length alone.
        cos = _row_of_each_token(self.cos_freqs, rows, seqs)
        sin = _row_of_each_token(self.sin_freqs, rows, seqs)
        x = seqs.float()
        x0, x1 = pairs(x, LAYOUTS[self.impl])
        if self.impl == "reference":
            turned = torch.cat((-x1, x0), dim=-1)
        else:  # the pull request fills a tensor of zeros; torch.stack would launch two kernels fewer
            turned = torch.zeros_like(x)
            turned[..., 0::2] = -x1
            turned[..., 1::2] = x0
        return (x * cos + turned * sin).type_as(seqs)

    def _table_shapes(self):
        shape = (self.max_seq_len + 1, self.encoding_dim)
        return {"cos_freqs": shape, "sin_freqs": shape}


class KernelRotaryEncoder(_Encoder):
    """The same contract over `ropelab.apply_rope`: one pass over memory in both layouts, with the cast.

    The encoder differs from the other two:

    - The tables are right to a rounding at every position, and have no row for padding. The others round the angle
      before they take its cosine.
    - float64 stays float64.
    - Padding has ``NO_POSITION`` (see `ropelab.positions`), so it becomes zero even where it was not finite, and also
      while decoding. The others, like fairseq2, rotate padding while decoding.

    Args:
        encoding_dim, max_seq_len, theta, freqs_init_fn, device, impl: as for `RotaryEncoder`.

    Attributes:
        cos, sin: float32 ``[max_seq_len, E/2]``.

    Raises:
        TypeError: a number, ``impl`` or ``freqs_init_fn`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``impl`` is unknown.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        freqs_init_fn: Callable[["KernelRotaryEncoder"], torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        impl: Impl = "llama",
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, freqs_init_fn=freqs_init_fn, device=device, impl=impl)

    def reset_non_persistent_buffers(self) -> None:
        """Fill the tables, for instance after ``to_empty``."""
        frequencies = self._frequencies()
        if frequencies is None:
            frequencies = inverse_frequencies(self.encoding_dim, self.theta)
        for table, values in zip(
            (self.cos, self.sin),
            frequency_tables(frequencies.double().cpu(), self.max_seq_len, device=self.cos.device),
            strict=True,
        ):
            table.copy_(values)

    def forward(
        self, seqs: torch.Tensor, seqs_layout: SeqsLayout, *, state_bag: StateBag | None = None
    ) -> torch.Tensor:
        """Rotate ``seqs``; see `RotaryEncoder.forward`."""
        first, relative = self._first_and_relative_positions(seqs, seqs_layout, state_bag)
        tokens = 1 if seqs_layout.packed else 2
        # [N, S, E] has one head. All axes between S and E together are the heads.
        heads = seqs.unsqueeze(-2) if seqs.ndim == tokens + 1 else seqs.flatten(tokens, -2)
        positions, seq_format = None, "bshd"
        if isinstance(relative, torch.Tensor):
            positions, first = torch.where(relative >= 0, first + relative, NO_POSITION), 0
            seq_format = "thd" if seqs_layout.packed else "bshd"
        try:
            return apply_rope(
                heads, cos=self.cos, sin=self.sin, layout=LAYOUTS[self.impl],
                seq_format=seq_format, positions=positions, offsets=first,
            ).view(seqs.shape)  # fmt: skip
        except (TypeError, ValueError) as error:
            raise renamed(error, q="seqs", cos="seqs", sin="seqs", positions="seqs_layout") from error

    def _table_shapes(self):
        shape = (self.max_seq_len, self.encoding_dim // 2)
        return {"cos": shape, "sin": shape}


def _row_of_each_token(table: torch.Tensor, rows: slice | torch.Tensor, seqs: torch.Tensor) -> torch.Tensor:
    """The rows of a table ``[P, W]`` for all tokens, ``[.., S, W]``, in a shape that broadcasts against ``seqs``."""
    found = table[rows]
    if isinstance(rows, slice):  # the same rows for all sequences
        found = found.unsqueeze(0)
    for _ in range(seqs.ndim - found.ndim):
        found = found.unsqueeze(-2)
    return found


def _reordered(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """The features of ``x`` in the order of another layout, as by `ropelab.layout.pairing.permutation`."""
    return join(*pairs(x, source), target)
