"""`Rope`, the rotation of a layer: the frequencies and the other choices of a model."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ropelab.angles import frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.angles.tables import axial_tables, frequency_tables
from ropelab.arguments import check_tensor, integer, integers, number, shown, tensor
from ropelab.foreign import hinted
from ropelab.layout.pairing import MOST_FEATURES, Layout, check_layout
from ropelab.positions import axes

ANY_LENGTH = range(sys.maxsize)


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of a layer.

    Example: ``cos, sin = rope_from_config(config).tables(4096)``.

    Attributes:
        inverse_frequencies: float64 ``[R/2]`` on the CPU, rad per position; a copy of the argument. A model
            that rotates the other way (nanochat) has negative frequencies.
        attention_factor: the positive factor of cos and sin.
        head_dim: the number of features of a head as `apply_rope` gets the head. DeepSeek's attention passes only the
            rotated part of a head, so ``R`` is all of ``head_dim`` there.
        first_feature: the first of the ``R`` features that rotate: 0, and 448 of 512 in DeepSeek-V4.
        layout, out_layout: as for `apply_rope`.
        axes: the axis of positions that each plane reads, where positions have several axes (M-RoPE, images); else
            None.
        max_seq_len: ``max_position_embeddings``, if the configuration has it; else None.
        lengths: the lengths of sequences for which these frequencies hold. `at_length` returns the rotation for another
            length.
        remake: makes the rotation for another length, as ``remake(seq_len=...)``; or None.
        inferred: maps each key that a configuration leaves open to the keys that its value was taken from, for example
            ``{"original_max_position_embeddings": "max_position_embeddings"}``.

    Raises:
        TypeError, ValueError: an attribute has another type or shape; or the frequencies are not finite, or they
            require grad although tables pass no gradient on to frequencies.
    """

    inverse_frequencies: torch.Tensor
    attention_factor: float = 1.0
    head_dim: int | None = None
    first_feature: int = 0
    layout: Layout = "split_half"
    out_layout: Layout | None = None
    axes: tuple[int, ...] | None = None
    max_seq_len: int | None = None
    lengths: range = ANY_LENGTH
    remake: Callable[..., "Rope"] | None = field(default=None, repr=False)
    inferred: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        theta = tensor("inverse_frequencies", self.inverse_frequencies)
        check_tensor("inverse_frequencies", theta, (1,), "[rotary_dim/2]")
        if theta.requires_grad or theta.device.type == "meta" or not len(theta) or not theta.isfinite().all():
            expected = "at least one frequency, all finite, and no requires_grad"
            raise ValueError(f"inverse_frequencies: expected {expected}, got {theta}")
        head_dim, planes = self.head_dim, len(theta)
        first = integer("first_feature", self.first_feature, at_least=0, below=MOST_FEATURES)
        if head_dim is not None:
            head_dim = integer("head_dim", head_dim, at_least=first + 2 * planes, below=MOST_FEATURES)
        check_layout(self.layout)
        if self.out_layout is not None:
            check_layout(self.out_layout, "out_layout")
        columns = self.axes if self.axes is None else integers("axes", self.axes, at_least=0)
        if columns is not None and len(columns) != planes:
            raise ValueError(f"axes: expected an axis for each of {planes} planes, got {len(columns)}")
        max_seq_len = self.max_seq_len
        if max_seq_len is not None:
            max_seq_len = integer("max_seq_len", max_seq_len, at_least=1, below=sys.maxsize)
        if not isinstance(self.lengths, range) or self.lengths.step != 1:
            raise TypeError(f"lengths: expected a range of step 1, got {self.lengths!r}")
        checked = {
            "inverse_frequencies": theta.detach().to("cpu", torch.float64, copy=True),
            "attention_factor": number("attention_factor", self.attention_factor, above=0),
            "head_dim": head_dim,
            "first_feature": first,
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
        return self.first_feature, self.first_feature + self.rotary_dim

    def at_length(self, seq_len: int) -> "Rope":
        """The rotation of sequences of ``seq_len`` tokens. It depends on ``seq_len`` in dynamic NTK and LongRoPE only.

        Raises:
            TypeError: ``seq_len`` is not an integer.
            ValueError: ``seq_len`` is negative, or is not in `lengths` and there is no ``remake``.
        """
        seq_len = integer("seq_len", seq_len, at_least=0, below=sys.maxsize)
        if seq_len in self.lengths:
            return self
        if self.remake is None:
            raise ValueError(f"seq_len: expected a length of this rotation, in {self.lengths}, got {seq_len}")
        return self.remake(seq_len=seq_len)

    def relative_to(self, other: "Rope") -> "Rope":
        """The rotation that turns what ``other`` has rotated into what this one makes of it, at the same positions.

        A pair turns by ``p (theta' - theta)`` at position p, and the attention factor is the quotient of both. With the
        tables of the result `rotate_cached_keys` brings cached keys to other frequencies, in one pass.

        Raises:
            TypeError: ``other`` is no `Rope`.
            ValueError: the two turn other features, pair them differently or read other axes.
        """
        if not isinstance(other, Rope):
            raise TypeError(f"other: expected a Rope, got {shown(other)}")
        mine, others = ((x.rotary_slice, x.out_layout or x.layout, x.axes) for x in (self, other))
        if mine != others:
            raise ValueError(f"other: expected the features, layout and axes {mine}, got {others}")
        return Rope(
            self.inverse_frequencies - other.inverse_frequencies, self.attention_factor / other.attention_factor,
            self.head_dim, self.first_feature, self.out_layout or self.layout, axes=self.axes,
            max_seq_len=self.max_seq_len,
        )  # fmt: skip

    def tables(
        self,
        seq_len: int,
        positions: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables ``(cos, sin)``, multiplied by the attention factor before the only rounding.

        Args:
            seq_len: the number of rows, above every ``|position|``.
            positions: the positions of the tokens along several axes, ``[axes, S]``, ``[axes, B, S]`` or ``[axes, T]``.
            dtype, device: as for `rotary_table`.

        Returns:
            ``[seq_len, R/2]``, with a row for each position. With ``positions``, ``[S, R/2]`` or ``[B, S, R/2]``, with
            a row for each token, as `axial_tables` returns.

        Raises:
            TypeError, ValueError: as `rotary_table` and `axial_tables`; or the frequencies do not hold for ``seq_len``;
                or ``positions`` is given for a rotation without ``axes``.
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
            raise ValueError("positions: expected None for a rotation with one axis (see apply_rope), got a tensor")
        if tensor("positions", positions).ndim and positions.shape[0] <= max(self.axes):
            raise ValueError(f"positions: expected {max(self.axes) + 1} axes, got shape {tuple(positions.shape)}")
        if positions.is_meta:
            raise ValueError(f"positions: expected values, got a tensor of shape {tuple(positions.shape)} on meta")
        return axial_tables(cos, sin, positions.to(cos.device), self.axes)

    def frequencies(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The ``frequencies`` that `apply_rope` takes in place of `tables`, with the attention factor.

        Call this method once, outside of compiled code: see `rotary_frequencies`. Positions along several axes go with
        ``axes``.
        """
        return fixed_point(self.inverse_frequencies, self.attention_factor, device=device)


@hinted
def axial_rope(axes_dims: Sequence[int], base: float = 10000.0, *, layout: Layout = "interleaved") -> Rope:
    """The rotation of images and video, where ``axes_dims[a]`` features rotate by the position along axis ``a``.

    Example: ``cos, sin = axial_rope((16, 56, 56)).tables(64, grid_positions(1, 8, 8))``.

    Args:
        axes_dims: even numbers of features whose sum is ``head_dim``, for example ``(16, 56, 56)`` in Flux.
        base: the base of the frequencies of every axis.
        layout: ``"interleaved"`` in Flux, Wan, HunyuanVideo and Qwen-Image.

    Raises:
        TypeError: ``axes_dims`` is not a sequence of integers, or ``base`` is not a number.
        ValueError: an axis does not have a positive even number of features, ``base`` is not positive, or the layout is
            unknown.
    """
    check_layout(layout)
    theta = frequencies.axial(axes_dims, base)
    columns = axes.sections([dim // 2 for dim in axes_dims])
    return Rope(theta, head_dim=2 * len(columns), layout=layout, axes=columns)
