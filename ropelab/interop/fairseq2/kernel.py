"""The rotary encoder of fairseq2 over `ropelab.apply_rope`, in both layouts."""

from collections.abc import Callable

import torch
from torch.fx import Proxy

from ropelab import NO_POSITION, apply_rope
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.tables import frequency_tables
from ropelab.call.traced import recorded
from ropelab.interop.fairseq2.contract import LAYOUTS, Encoder, Impl
from ropelab.interop.fairseq2.layouts import SeqsLayout, StateBag
from ropelab.interop.refusals import renamed
from ropelab.layout.seq_format import SeqFormat


class KernelEncoder(Encoder):
    """The base of the encoders over the kernel: a call is one launch, from ``seqs`` to the result in its dtype.

    An encoder differs from fairseq2's encoders:

    - The tables are right to a rounding at every position, and have no row for padding. fairseq2 rounds the angle
      before it takes the cosine.
    - float64 stays float64.
    - Padding has ``NO_POSITION`` (see `ropelab.positions`), so it becomes zero even where it was not finite, and also
      while decoding. fairseq2 rotates padding while decoding, by the position before the first token of the call.

    Attributes:
        cos, sin: float32 ``[max_seq_len, E/2]``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def reset_non_persistent_buffers(self) -> None:
        """Fill the tables, for instance after ``to_empty``."""
        tables = frequency_tables(self._frequencies(), self.max_seq_len, self._factor(), device=self.cos.device)
        for table, values in zip((self.cos, self.sin), tables, strict=True):
            table.copy_(values)

    def forward(
        self, seqs: torch.Tensor, seqs_layout: SeqsLayout, *, state_bag: StateBag | None = None
    ) -> torch.Tensor:
        """Rotate ``seqs``, ``[N, S, *, E]`` or packed ``[S, *, E]``.

        Args:
            seqs_layout: fairseq2's ``BatchLayout``, or an object with the attributes of `SeqsLayout`.
            state_bag: fairseq2's ``IncrementalStateBag``, or an object with ``step_nr``: the first token is at the
                position ``step_nr``, unless the encoder is training.

        Returns:
            A tensor of the shape and dtype of ``seqs``, differentiable in ``seqs``.

        Raises:
            TypeError: ``seqs`` is not a floating tensor, or the layout or the state lacks an attribute.
            ValueError: ``seqs`` has another last dimension, a position is beyond the tables, or the layout has another
                shape.
        """
        if isinstance(seqs, Proxy):
            return recorded(self.forward, locals())
        first, relative = self._first_and_relative_positions(seqs, seqs_layout, state_bag)
        tokens = 1 if seqs_layout.packed else 2
        # [N, S, E] has one head. All axes between S and E together are the heads.
        heads = seqs.unsqueeze(-2) if seqs.ndim == tokens + 1 else seqs.flatten(tokens, -2)
        positions: torch.Tensor | None = None
        seq_format: SeqFormat = "bshd"
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

    def _frequencies(self) -> torch.Tensor:
        """The frequencies of the tables, float64 ``[E/2]`` on the CPU, rad per position."""
        raise NotImplementedError

    def _factor(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def _table_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.max_seq_len, self.encoding_dim // 2)
        return {"cos": shape, "sin": shape}


class KernelRotaryEncoder(KernelEncoder):
    """fairseq2's ``RotaryEncoder`` over the kernel, with ``impl`` as in fairseq2#1213.

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
        theta: float = 10_000.0,
        freqs_init_fn: Callable[["KernelRotaryEncoder"], torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        impl: Impl = "llama",
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl=impl, freqs_init_fn=freqs_init_fn)
        self.reset_parameters()

    def _frequencies(self) -> torch.Tensor:
        given = self._given_frequencies()
        return inverse_frequencies(self.encoding_dim, self.theta) if given is None else given.double().cpu()
