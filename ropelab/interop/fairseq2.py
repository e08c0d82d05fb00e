"""fairseq2's rotary encoders over the kernel: the contract of ``RotaryEncoder`` in both layouts, two bases, and YaRN.

The contract comes from fairseq2 0.8.1 (``fairseq2.nn.position_encoder``, ``fairseq2.nn.batch_layout``,
``fairseq2.nn.incremental_state``). The call of every encoder is ``encoder(seqs, seqs_layout, *, state_bag=None)``. The
encoders take fairseq2's own ``BatchLayout`` and ``IncrementalStateBag``, and all objects with the attributes of
`SeqsLayout` and `StateBag`. ``impl`` names the layout of the features, as fairseq2#1213 does: ``"llama"`` rotates
adjacent pairs, ``"reference"`` rotates the two halves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.fx import Proxy

from ropelab import NO_POSITION, apply_rope
from ropelab.angles import frequencies
from ropelab.angles.tables import MOST_ROWS, frequency_tables
from ropelab.arguments import (
    DTYPES,
    POSITION_DTYPES,
    check_shape,
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
from ropelab.call.refusals import in_words
from ropelab.call.traced import recorded
from ropelab.layout.pairing import Layout, check_rotary_dim

__all__ = [
    "LAYOUTS", "BatchLayout", "DualRotaryEncoder", "Impl", "KernelRotaryEncoder", "SeqsLayout", "StateBag",
    "YaRNRotaryEncoder",
]  # fmt: skip

Impl = Literal["llama", "reference"]
LAYOUTS: dict[str, Layout] = {"llama": "interleaved", "reference": "split_half"}
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


class KernelEncoder(torch.nn.Module):
    """The base of the encoders: a call is one launch, from ``seqs`` to the result in its dtype.

    An encoder differs from fairseq2's encoders:

    - The tables are right to a rounding at every position, and have no row for padding. fairseq2 rounds the angle
      before it takes the cosine.
    - float64 stays float64.
    - Padding has ``NO_POSITION`` (see `ropelab.positions`), so it becomes zero even where it was not finite, and also
      while decoding. fairseq2 rotates padding while decoding, by the position before the first token of the call.

    The tables move with the module, and checkpoints leave them out. The constructor of an encoder calls
    ``reset_parameters`` when its attributes are complete.

    Attributes:
        cos, sin: float32 ``[max_seq_len, E/2]``.
        attention_scaling: the factor of cosines and sines.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    attention_scaling = 1.0

    def __init__(
        self, encoding_dim: int, max_seq_len: int, *, theta: float, device: torch.device | str | None, impl: Impl
    ):
        super().__init__()
        self.encoding_dim = check_rotary_dim(encoding_dim, "encoding_dim")
        self.max_seq_len = integer("max_seq_len", max_seq_len, 1, MOST_ROWS)
        self.theta, self.impl = number("theta", theta, above=0), choice("impl", impl, tuple(LAYOUTS))
        device, shape = usable("device", device), (self.max_seq_len, self.encoding_dim // 2)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(shape, device=device, dtype=torch.float32), persistent=False)

    def reset_parameters(self) -> None:
        """Fill the tables, which checkpoints leave out. The encoder has no parameters."""
        self.reset_non_persistent_buffers()

    def reset_non_persistent_buffers(self) -> None:
        """Fill the tables, for instance after ``to_empty``."""
        rows, factor = self.max_seq_len, self.attention_scaling
        tables = frequency_tables(self._frequencies(), rows, factor, device=self.cos.device)
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
        where = self._where(seqs, seqs_layout, state_bag)
        tokens = 1 if seqs_layout.packed else 2
        # [N, S, E] has one head. All axes between S and E together are the heads.
        heads = seqs.unsqueeze(-2) if seqs.ndim == tokens + 1 else seqs.flatten(tokens, -2)
        rotate = in_words(apply_rope, q="seqs", cos="seqs", sin="seqs", positions="seqs_layout")
        return rotate(heads, cos=self.cos, sin=self.sin, layout=LAYOUTS[self.impl], **where).view(seqs.shape)

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        return (
            f"encoding_dim={self.encoding_dim}, max_seq_len={self.max_seq_len}, theta={self.theta}, impl={self.impl!r}"
        )

    def _frequencies(self) -> torch.Tensor:
        """The frequencies of the tables, float64 ``[E/2]`` on the CPU, rad per position."""
        raise NotImplementedError

    def _where(self, seqs: torch.Tensor, layout: SeqsLayout, state_bag: StateBag | None) -> dict[str, Any]:
        """The arguments of `ropelab.apply_rope` for the positions of the tokens."""
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
            return {"offsets": first}
        indices: Any = getattr(layout, "position_indices", None)
        check_shape("seqs_layout.position_indices", indices, seqs.shape[:tokens], seqs, "seqs", POSITION_DTYPES)
        positions = torch.where(indices >= 0, first + indices, NO_POSITION)
        return {"positions": positions, "seq_format": "thd" if layout.packed else "bshd"}


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
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl=impl)
        if freqs_init_fn is not None and not callable(freqs_init_fn):
            raise TypeError(f"freqs_init_fn: expected a function of the encoder or None, got {shown(freqs_init_fn)}")
        self.freqs_init_fn = freqs_init_fn
        self.reset_parameters()

    def _frequencies(self) -> torch.Tensor:
        if self.freqs_init_fn is None:
            return frequencies.inverse_frequencies(self.encoding_dim, self.theta)
        found = tensor("freqs_init_fn", self.freqs_init_fn(self))
        check_tensor("freqs_init_fn", found, (1,), f"({self.encoding_dim // 2},)", (torch.float32, torch.float64))
        if found.shape[0] != self.encoding_dim // 2:
            raise ValueError(f"freqs_init_fn: expected {self.encoding_dim // 2} frequencies, got {found.shape[0]}")
        return found.double().cpu()


class DualRotaryEncoder(KernelEncoder):
    """fairseq2's ``DualRotaryEncoder``, with one base for the first half of the features and another for the second.

    Each half has adjacent pairs and the frequencies of a head of ``E/2`` features. The adjacent pairs of the two halves
    are the adjacent pairs of all E features, so the encoder rotates all features in one launch, by the frequencies of
    both halves side by side. The original calls two encoders and concatenates their results.

    The contract comes from fairseq2 0.8.1 (``fairseq2.nn.position_encoder.DualRotaryEncoder``). The encoder has no
    submodules ``rope_std`` and ``rope_long``.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; a multiple of 4.
        max_seq_len: the number of positions that the tables serve.
        theta: the base of the frequencies of the first half.
        dual_theta: the base of the frequencies of the second half.
        device: the device of the tables, by default torch's default device.

    Raises:
        TypeError: a number has another type.
        ValueError: ``encoding_dim`` is no multiple of 4, or a number is out of range.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        dual_theta: float = 100_000.0,
        device: torch.device | str | None = None,
    ):
        if integer("encoding_dim", encoding_dim, at_least=4) % 4:
            raise ValueError(f"encoding_dim: expected a multiple of 4, got {encoding_dim}")
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl="llama")
        self.dual_theta = number("dual_theta", dual_theta, above=0)
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        return f"{super().extra_repr()}, dual_theta={self.dual_theta}"

    def _frequencies(self) -> torch.Tensor:
        half = self.encoding_dim // 2
        return torch.cat([frequencies.inverse_frequencies(half, base) for base in (self.theta, self.dual_theta)])


class YaRNRotaryEncoder(KernelEncoder):
    """fairseq2's ``YaRNRotaryEncoder``, OLMo 3's encoder for long contexts: halves, with YaRN's frequencies and factor.

    The contract comes from fairseq2 0.8.1 (``fairseq2.models.olmo.yarn_rope``), the frequencies from
    `ropelab.angles.frequencies.yarn`. The tables of this encoder contain the factor. fairseq2 multiplies by the factor
    in every call, and rounds every step of the frequencies to float32.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; even.
        max_seq_len: the number of positions that the tables serve, after the extension.
        theta: the base of the frequencies.
        scale_factor: the factor by which the context was extended.
        original_max_seq_len: the length of the context before the extension.
        beta_fast, beta_slow: the turns within the original length at which the ramp of the frequencies begins and ends.
        mscale, mscale_all_dim: with ``m(a) = 0.1 a ln(scale_factor) + 1``, or 1 for a ``scale_factor`` up to 1, the
            factor of cosines and sines is ``m(mscale) / m(mscale_all_dim)`` if neither is 0; ``m(mscale)`` if
            ``mscale_all_dim`` is 0; ``m(1)`` if ``mscale`` is 0.
        truncate: whether the ends of the ramp are rounded outwards to whole planes.
        device: the device of the tables, by default torch's default device.

    Attributes:
        attention_scaling: the factor of cosines and sines.

    Raises:
        TypeError: a number or ``truncate`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``beta_fast`` is below ``beta_slow``.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 500_000.0,
        scale_factor: float,
        original_max_seq_len: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        truncate: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl="reference")
        self.scale_factor = number("scale_factor", scale_factor, above=0)
        self.original_max_seq_len = integer("original_max_seq_len", original_max_seq_len, at_least=1)
        self.beta_fast = number("beta_fast", beta_fast, above=0)
        self.beta_slow = number("beta_slow", beta_slow, above=0)
        self.mscale_param = number("mscale", mscale, at_least=0)
        self.mscale_all_dim = number("mscale_all_dim", mscale_all_dim, at_least=0)
        self.truncate = flag("truncate", truncate)
        m = frequencies.yarn_attention_factor
        if self.mscale_param and self.mscale_all_dim:
            self.attention_scaling = m(self.scale_factor, self.mscale_param, self.mscale_all_dim)
        else:  # m is linear in a, and m(0) = 1
            self.attention_scaling = 1 + (self.mscale_param or 1.0) * (m(self.scale_factor) - 1)
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        scaling = f"scale_factor={self.scale_factor}, attention_scaling={self.attention_scaling:.4f}"
        return f"{super().extra_repr()}, {scaling}"

    def _frequencies(self) -> torch.Tensor:
        words = {"base": "theta", "factor": "scale_factor", "original_max_position_embeddings": "original_max_seq_len"}
        return in_words(frequencies.yarn, **words)(
            self.encoding_dim, self.theta, self.scale_factor, self.original_max_seq_len,
            beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate,
        )  # fmt: skip
