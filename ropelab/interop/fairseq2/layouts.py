"""Describe a batch as fairseq2 does: which elements are tokens, and their positions.

The contract comes from fairseq2 0.8.1 (``fairseq2.nn.batch_layout``, ``fairseq2.nn.incremental_state``). The encoders
take fairseq2's own ``BatchLayout`` and ``IncrementalStateBag``, and all objects with the attributes of `SeqsLayout` and
`StateBag`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ropelab.arguments import device as usable
from ropelab.arguments import flag, integers


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

    Attributes:
        width: S, the number of elements of a row, or of the packed batch.

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
        shape = integers("shape", shape, below=2**31)
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
        self.width, self.packed, self.padded = width, packed, bool((indices < 0).any())
        self.max_seq_len = max(lengths)
        self.position_indices = indices.to(usable("device", device))
