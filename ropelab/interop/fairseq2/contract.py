"""The part of fairseq2's contract that all rotary encoders share: arguments, tables and positions.

The call of every encoder is ``encoder(seqs, seqs_layout, *, state_bag=None)``. ``impl`` names the layout of the
features, as fairseq2#1213 does: ``"llama"`` rotates adjacent pairs, ``"reference"`` rotates the two halves.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch

from ropelab.angles.tables import MOST_ROWS
from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, choice, integer, number, shown, tensor
from ropelab.arguments import device as usable
from ropelab.interop.fairseq2.layouts import SeqsLayout, StateBag
from ropelab.layout.pairing import Layout, check_rotary_dim

Impl = Literal["llama", "reference"]
LAYOUTS: dict[str, Layout] = {"llama": "interleaved", "reference": "split_half"}
"""``impl`` -> ropelab's name of the layout."""


class Encoder(torch.nn.Module):
    """The base of the encoders: their arguments, their tables, and the position of each token.

    The tables are float32 buffers that move with the module, and checkpoints leave them out. The constructor of an
    encoder calls ``reset_parameters`` when its attributes are complete.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; even.
        max_seq_len: the number of positions that the tables serve.
        theta: the base of the frequencies.
        freqs_init_fn: a function of the encoder that returns other frequencies, ``[E/2]``, rad per position.
        device: the device of the tables, by default torch's default device.
        impl: ``"llama"`` for adjacent pairs; ``"reference"`` for halves.

    Raises:
        TypeError: a number, ``impl`` or ``freqs_init_fn`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``impl`` is unknown.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float,
        device: torch.device | str | None,
        impl: Impl,
        freqs_init_fn: Callable[[Self], torch.Tensor] | None = None,
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

    def _given_frequencies(self) -> torch.Tensor | None:
        """The frequencies of ``freqs_init_fn``, ``[E/2]``, or None without such a function."""
        if self.freqs_init_fn is None:
            return None
        found = tensor("freqs_init_fn", self.freqs_init_fn(self))
        check_tensor("freqs_init_fn", found, (1,), f"({self.encoding_dim // 2},)", (torch.float32, torch.float64))
        if found.shape[0] != self.encoding_dim // 2:
            raise ValueError(f"freqs_init_fn: expected {self.encoding_dim // 2} frequencies, got {found.shape[0]}")
        return found

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
