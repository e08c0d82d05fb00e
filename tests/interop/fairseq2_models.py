"""Models of fairseq2#1213's two encoders, for tests on machines that lack the pull request's own file.

The models follow the contract of fairseq2 0.8.1 and the pull request's description of ``impl`` and of the ways to
reorder. `test_fairseq2_code` holds them to the bits of the pull request's file. No study measures them.

Both models compute in float32 and cast the result to the dtype of ``seqs``.
"""

from collections.abc import Callable

import torch

from ropelab.interop.fairseq2 import BatchLayout
from ropelab.interop.fairseq2.contract import LAYOUTS, Encoder, Impl
from ropelab.interop.fairseq2.layouts import SeqsLayout, StateBag
from ropelab.layout.pairing import join, pairs
from ropelab.study.documents.fairseq2.encoders import Encoders


class _Model(Encoder):
    """The rows of the tables that each token reads. Row 0 serves padding, and row 1 serves position 0."""

    def _angles(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The angles of the tables, ``[max_seq_len, E/2]``: products of positions and frequencies, in float32."""
        return torch.outer(torch.arange(self.max_seq_len, device=frequencies.device, dtype=torch.float32), frequencies)

    def _rows(self, seqs: torch.Tensor, layout: SeqsLayout, state_bag: StateBag | None) -> slice | torch.Tensor:
        """The rows of the tokens. As in fairseq2, padding reads row 0 only while no token has been decoded before."""
        first, relative = self._first_and_relative_positions(seqs, layout, state_bag)
        return 1 + first + relative if isinstance(relative, torch.Tensor) else slice(1 + first, 1 + first + relative)


class RotaryEncoder(_Model):
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
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl=impl, freqs_init_fn=freqs_init_fn)
        self.reset_parameters()

    def reset_non_persistent_buffers(self) -> None:
        """Fill the table, for instance after ``to_empty``."""
        frequencies = self._given_frequencies()
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
            x = self._split_to_consecutive_layout(tensor=x)
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        y = torch.view_as_real(z * turns).flatten(-2)
        if self.impl == "reference":
            y = self._consecutive_to_split_layout(tensor=y)
        return y.type_as(seqs)

    # The names of the next two methods are the pull request's: `measure.reorderings` puts other ways in their place.

    def _split_to_consecutive_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(pairs(tensor, "split_half"), dim=-1).view(tensor.shape)

    def _consecutive_to_split_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(pairs(tensor, "interleaved"), dim=-1)

    def _table_shapes(self):
        return {"freqs": (self.max_seq_len + 1, self.encoding_dim // 2, 2)}


class ReferenceRotaryEncoder(_Model):
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
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl=impl)
        self.reset_parameters()

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
        # Two statements, because torch 2.11 would compile a comprehension for this length alone.
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


def _row_of_each_token(table: torch.Tensor, rows: slice | torch.Tensor, seqs: torch.Tensor) -> torch.Tensor:
    """The rows of a table ``[P, W]`` for all tokens, ``[.., S, W]``, in a shape that broadcasts against ``seqs``."""
    found = table[rows]
    if isinstance(rows, slice):  # the same rows for all sequences
        found = found.unsqueeze(0)
    for _ in range(seqs.ndim - found.ndim):
        found = found.unsqueeze(-2)
    return found


MODELS = Encoders("our model", {"RE": RotaryEncoder, "RRE": ReferenceRotaryEncoder}, BatchLayout)
