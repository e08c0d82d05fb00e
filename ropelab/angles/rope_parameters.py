"""How a layer rotates: its frequencies, and what else `apply_rope` is to be told."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ropelab.angles import frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.angles.tables import axial_tables, frequency_tables
from ropelab.arguments import check_tensor, integer, integers, number, tensor
from ropelab.layout.pairing import MOST_FEATURES, check_layout
from ropelab.positions import axes

ANY_LENGTH = range(sys.maxsize)


@dataclass(frozen=True, eq=False)
class Rope:
    """How a layer rotates.

    Attributes:
        inverse_frequencies: float64 ``[R/2]`` on the CPU, rad per position; a copy of what is given.
        attention_factor: of cos and sin; positive.
        head_dim: features of a head as the rotation is given it; the first ``R`` rotate. (In DeepSeek's attention
            that is the rotated part alone, so ``R`` is all of it.)
        layout, out_layout: as for `apply_rope`, as far as ``model_type`` tells: unknown models are taken to be
            ``"split_half"``, which nearly all of transformers is.
        axes: axis of each column where positions have several (M-RoPE, images), else None.
        max_seq_len: ``max_position_embeddings``, if the configuration has it.
        lengths: of the sequences that these frequencies serve; for others ask `at_length`, which asks
            ``remake(seq_len=...)``.
        inferred: of a configuration, each key that it leaves open -> the keys that its value was taken from, such as
            ``{"original_max_position_embeddings": "max_position_embeddings"}``.

    Raises:
        TypeError, ValueError: an attribute of another type or shape, frequencies that are not finite or that require
            grad (tables of them have none).
    """

    inverse_frequencies: torch.Tensor
    attention_factor: float = 1.0
    head_dim: int | None = None
    layout: str = "split_half"
    out_layout: str | None = None
    axes: tuple[int, ...] | None = None
    max_seq_len: int | None = None
    lengths: range = ANY_LENGTH
    remake: Callable[..., "Rope"] | None = field(default=None, repr=False)
    inferred: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        theta = tensor("inverse_frequencies", self.inverse_frequencies)
        check_tensor("inverse_frequencies", theta, (1,), "[rotary_dim/2]")
        if theta.requires_grad or theta.device.type == "meta" or not len(theta) or not theta.isfinite().all():
            expected = "at least one finite frequency, without grad"
            raise ValueError(f"inverse_frequencies: expected {expected}, got {theta}")
        head_dim, planes = self.head_dim, len(theta)
        if head_dim is not None:
            head_dim = integer("head_dim", head_dim, at_least=2 * planes, below=MOST_FEATURES)
        check_layout(self.layout)
        if self.out_layout is not None:
            check_layout(self.out_layout, "out_layout")
        columns = self.axes if self.axes is None else integers("axes", self.axes, at_least=0)
        if columns is not None and len(columns) != planes:
            raise ValueError(f"axes: expected one for each of {planes} planes, got {len(columns)}")
        max_seq_len = self.max_seq_len
        if max_seq_len is not None:
            max_seq_len = integer("max_seq_len", max_seq_len, at_least=1, below=sys.maxsize)
        if not isinstance(self.lengths, range) or self.lengths.step != 1:
            raise TypeError(f"lengths: expected a range of step 1, got {self.lengths!r}")
        checked = {
            "inverse_frequencies": theta.detach().to("cpu", torch.float64, copy=True),
            "attention_factor": number("attention_factor", self.attention_factor, above=0),
            "head_dim": head_dim,
            "axes": columns,
            "max_seq_len": max_seq_len,
            "inferred": dict(self.inferred),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # frozen from here on

    @property
    def rotary_dim(self) -> int:
        """R, the number of features that rotate."""
        return 2 * len(self.inverse_frequencies)

    @property
    def rotary_slice(self) -> tuple[int, int]:
        """``(first, end)`` of the features that rotate."""
        return 0, self.rotary_dim

    def at_length(self, seq_len: int) -> "Rope":
        """The rotation of sequences of ``seq_len`` tokens: another one for dynamic NTK and LongRoPE only.

        Raises:
            TypeError: not an integer.
            ValueError: a negative length, or one that nobody knows the rotation of.
        """
        seq_len = integer("seq_len", seq_len, at_least=0, below=sys.maxsize)
        if seq_len in self.lengths:
            return self
        if self.remake is None:
            raise ValueError(f"seq_len: expected a length in {self.lengths}, that of this rotation, got {seq_len}")
        return self.remake(seq_len=seq_len)

    def tables(
        self,
        seq_len: int,
        positions: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(cos, sin)``, the attention factor folded in before the one rounding.

        Args:
            seq_len: number of rows: every ``|position|`` is below it.
            positions: ``[axes, S]``, ``[axes, B, S]`` or ``[axes, T]`` along several axes.
            dtype, device: of the result, as for `rotary_table`.

        Returns:
            ``[seq_len, R/2]``; with ``positions`` those of each token, ``[S, R/2]`` or ``[B, S, R/2]``, as of
            `axial_tables`.

        Raises:
            TypeError, ValueError: as `rotary_table` and `axial_tables`; a length that these frequencies are not for,
                or positions of a rotation without axes.
        """
        seq_len = integer("seq_len", seq_len, at_least=0)
        if seq_len >= self.lengths.stop:
            raise ValueError(f"seq_len: expected at most {self.lengths[-1]} (see at_length), got {seq_len}")
        cos, sin = frequency_tables(
            self.inverse_frequencies, seq_len, self.attention_factor, dtype=dtype, device=device
        )
        if positions is None:
            return cos, sin
        if self.axes is None:
            raise ValueError("positions: expected none for a rotation with one axis (see apply_rope), got a tensor")
        if tensor("positions", positions).ndim and positions.shape[0] <= max(self.axes):
            raise ValueError(f"positions: expected {max(self.axes) + 1} axes, got shape {tuple(positions.shape)}")
        return axial_tables(cos, sin, positions.to(cos.device), self.axes)

    def frequencies(self, device: torch.device | str | None = None) -> torch.Tensor:
        """What `apply_rope` takes in place of `tables`, the attention factor included.

        To be made once, outside of what is compiled: see `rotary_frequencies`.

        Raises:
            ValueError: positions have several axes, for which the tables of the tokens are made.
        """
        if self.axes is not None:
            raise ValueError(
                f"axes: expected None, one axis of positions, for a rotation without tables, got {self.axes}"
            )
        return fixed_point(self.inverse_frequencies, self.attention_factor, device=device)


def axial_rope(axes_dims: Sequence[int], base: float = 10000.0, *, layout: str = "interleaved") -> Rope:
    """The rotation of images and video: ``axes_dims[a]`` features turn by the position along axis ``a``.

    Args:
        axes_dims: e.g. ``(16, 56, 56)`` of Flux; even, their sum is ``head_dim``.
        base: of the frequencies of every axis.
        layout: ``"interleaved"`` in Flux, Wan, HunyuanVideo and Qwen-Image.

    Raises:
        TypeError: ``axes_dims`` not a sequence of integers, ``base`` not a number.
        ValueError: an axis without a positive even number of features, ``base`` not positive, unknown layout.
    """
    check_layout(layout)
    theta = frequencies.axial(axes_dims, base)
    columns = axes.sections([dim // 2 for dim in axes_dims])
    return Rope(theta, head_dim=2 * len(columns), layout=layout, axes=columns)
