"""`RotaryEmbedding`, the rotation as a module that a model keeps for all of its layers.

Tables depend on the frequencies, the device and the number of rows alone, so they are no part of a model's state. The
module has no parameters and no buffers: ``.half()`` cannot round the tables, a checkpoint cannot lack the tables,
``to_empty`` cannot leave them uninitialised, and DistributedDataParallel does not broadcast them in every step.
"""

from typing import Any, Never
from weakref import WeakValueDictionary

import torch
from torch.fx import Proxy

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.model_config import rope_from_config
from ropelab.angles.rope_parameters import Rope
from ropelab.angles.tables import MOST_ROWS, check_dtype, frequency_tables
from ropelab.arguments import POSITION_DTYPES, check_tensor, integer, shown, tensor
from ropelab.arguments import device as usable
from ropelab.call.traced import recorded
from ropelab.foreign import hinted, unexpected
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import Layout, check_rotary_dim
from ropelab.layout.seq_format import SEQ_AXIS, SeqFormat, check_heads, check_seq_format, rank
from ropelab.not_compiled import not_compiled
from ropelab.rope import apply_rope

FEWEST_ROWS = 512
MOST_UNSAID = 2**22
"""The longest sequence that the positions of a call alone can ask for: one wrong position must not fill the memory."""


class RotaryEmbedding(torch.nn.Module):
    """A module that rotates queries and keys as a model does::

        rotary = RotaryEmbedding(128, base=500_000.0)           # head_dim, and rope_theta of the model
        rotary = RotaryEmbedding.from_config(config)            # or all of it from a configuration
        q, k = rotary(q, k)                                     # tokens 0, 1, 2, ...
        q, k = rotary(q, k, offsets=cache_length)               # the next tokens
        q, k = rotary(q, k, positions=positions, seq_len=8192)  # the host knows that no position exceeds 8191

    The module computes tables in float64 and keeps them in ``dtype`` on the device of ``q``. A change of the model's
    dtype does not change the tables. The number of rows grows by powers of two when a call needs more rows. Modules
    that rotate alike share their tables.

    In dynamic NTK and LongRoPE the frequencies depend on the length. Every call uses the frequencies of its own
    ``seq_len``, and earlier calls have no influence. (Dynamic NTK in transformers keeps the base of the longest
    sequence so far, until a sequence is shorter than the trained length.)

    **torch.compile and CUDA graphs.** A call never makes the host wait for the GPU. Tables cannot grow in compiled code
    or during a capture, so call `prepare` with the longest length before. Without `prepare` a compiled call breaks the
    graph whenever the tables must grow, and with ``fullgraph=True`` it raises. A graph that was captured before the
    tables grew keeps its own tables alive and goes on reading them.

    Args:
        rope: the number of features of a head, all of which rotate by unscaled frequencies; or any other rotation, from
            `rope_from_config` or `axial_rope`.
        base: the base of the frequencies beside a number of features, by default 10000.0; None beside a `Rope`.
        layout: the layout beside a number of features, as for `apply_rope`, by default ``"split_half"``; None beside a
            `Rope`.
        seq_format: the order of the axes of ``q`` and ``k``, as for `apply_rope`.
        dtype: the dtype of the tables.

    Raises:
        TypeError, ValueError: ``rope`` is neither a `Rope` nor a positive even number, ``base`` or ``layout`` is given
            beside a `Rope` or cannot be used, the format is unknown, or tables cannot have the dtype.
    """

    @hinted
    def __init__(
        self,
        rope: Rope | int,
        *,
        base: float | None = None,
        layout: Layout | None = None,
        seq_format: SeqFormat = "bshd",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if not isinstance(rope, Rope):
            rope = _unscaled(rope, 10000.0 if base is None else base, "split_half" if layout is None else layout)
        elif base is not None or layout is not None:
            name, value = ("base", base) if base is not None else ("layout", layout)
            raise ValueError(f"{name}: expected None beside a Rope, which has its own, got {value!r}")
        check_seq_format(seq_format)
        check_dtype(dtype)
        self.rope, self.seq_format, self.dtype = rope, seq_format, dtype
        self._slice = None if rope.rotary_slice == (0, rope.head_dim or rope.rotary_dim) else rope.rotary_slice
        # A device has two entries, for lengths that `rope` serves and for others, so short and long prompts may mix.
        self._tables: dict[tuple[torch.device, bool], _Tables] = {}

    @classmethod
    def from_config(
        cls, config: Any, *, layer_type: str | None = None, layout: Layout | None = None, **options
    ) -> "RotaryEmbedding":
        """The module for a model, from a configuration of transformers: see `rope_from_config`."""
        return cls(rope_from_config(config, layer_type=layer_type, layout=layout), **options)

    @hinted
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        offsets: int | torch.Tensor = 0,
        seq_len: int | None = None,
        inverse: bool = False,
        inplace: bool = False,
        **foreign: Never,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The rotated q, or q and k.

        Args:
            q, k, offsets, inverse, inplace: as for `apply_rope`.
            positions: as for `apply_rope` (see `ropelab.positions`). If ``rope.axes`` says which plane reads which
                axis, also positions along several axes, ``[axes, B, S]`` (``thd``: ``[axes, T]``).
            seq_len: the length of the longest sequence, cache included, above all ``|positions|``. By default the
                module takes it from an integer ``offsets``, from positions or offsets in CPU memory, or else from the
                model's ``max_position_embeddings``. Beyond four million positions and ``max_position_embeddings`` it
                must be given.

        Raises:
            TypeError: an argument is not a tensor, or a number has another type.
            ValueError: as `apply_rope`; or ``seq_len`` is missing for positions or offsets on a GPU, and the model has
                no ``max_position_embeddings`` or has frequencies that depend on the length.
        """
        if isinstance(q, Proxy):
            return recorded(self.forward, locals())
        if foreign:
            raise unexpected(RotaryEmbedding.forward, *foreign)
        check_heads("q", tensor("q", q), self.seq_format)
        if (end := self.rope.rotary_slice[1]) > q.shape[-1]:
            raise ValueError(f"q: expected heads of at least the {end} features of this module, got {q.shape[-1]}")
        if positions is not None:
            check_tensor("positions", positions, (1, 2, 3), "[S], [B, S] or [axes, B, S]", POSITION_DTYPES)
        if isinstance(offsets, torch.Tensor):
            check_tensor("offsets", offsets, (1,), "[B]", POSITION_DTYPES)
        else:
            offsets = integer("offsets", offsets, at_least=-MOST_ROWS, below=MOST_ROWS)
        if seq_len is None:
            seq_len = self._needed_length(q, positions, offsets)
        else:
            seq_len = _rows(seq_len)
        tables = self._prepared(seq_len, q.device)
        along_axes = positions is not None and positions.ndim == rank(self.seq_format) - 1
        return apply_rope(
            q, k, cos=tables.cos, sin=tables.sin, layout=self.rope.layout, out_layout=self.rope.out_layout,
            seq_format=self.seq_format, positions=positions, axes=tables.axes if along_axes else None,
            offsets=offsets, inverse=inverse, inplace=inplace,
            rotary_slice=self._slice,
        )  # fmt: skip

    def tables(self, seq_len: int, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(cos, sin)``, each ``[rows, R/2]`` with at least ``seq_len`` rows, for `apply_rope` and `axial_tables`.

        The results are copies, so that nobody can change the tables that modules share.

        Args:
            seq_len: the number of positions, at most 2**31.
            device: the device of the tables, by default torch's default device.

        Raises:
            TypeError, ValueError: ``seq_len`` is not a number of tokens, or the device does not exist.
        """
        tables = self._prepared(_rows(seq_len), usable("device", device))
        return tables.cos.clone(), tables.sin.clone()

    def prepare(self, seq_len: int, device: torch.device | str | None = None) -> None:
        """Make the tables for sequences of up to ``seq_len`` tokens on ``device``.

        Dynamic NTK has other frequencies for every length beyond the trained length. The tables for such a length serve
        sequences of exactly ``seq_len`` tokens.

        Raises:
            RuntimeError: the tables are missing during the capture of a CUDA graph.
        """
        self._prepared(_rows(seq_len), usable("device", device))

    def _prepared(self, seq_len: int, device: torch.device) -> "_Tables":
        tables = self._tables.get((device, _within(seq_len, self.rope.lengths)))
        if tables is None or seq_len > tables.rows or not _within(seq_len, tables.lengths):
            tables = self._grow(seq_len, device)
        return tables

    @not_compiled
    def _grow(self, seq_len: int, device: torch.device) -> "_Tables":
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"seq_len: expected prepare({seq_len}) before the capture of a CUDA graph, got a call during it"
            )
        tables = _shared_tables(self.rope.at_length(seq_len), seq_len, self.dtype, device)
        if type(tables.cos) is torch.Tensor:  # a compiler that traces makes tensors of other types
            self._tables[device, _within(seq_len, self.rope.lengths)] = tables
        return tables

    def _needed_length(self, q: torch.Tensor, positions: torch.Tensor | None, offsets: int | torch.Tensor) -> int:
        """One more than the largest |position|, as far as the host knows it without waiting for a GPU."""
        tokens = q.shape[SEQ_AXIS[self.seq_format]]
        if positions is not None:
            name, given, last = "positions", positions, 0
        elif isinstance(offsets, torch.Tensor):
            name, given, last = "offsets", offsets, tokens - 1
        elif isinstance(offsets, int) and offsets == NO_POSITION:  # no token has a position
            return 0
        else:
            return self._checked("offsets", offsets, max(offsets + tokens, 1 - offsets))
        if given.device.type == "cpu" and not torch.compiler.is_compiling():
            real = given[given != NO_POSITION]
            if not real.numel():
                return 0
            first, last = int(real.min()), int(real.max()) + last
            return self._checked(name, last if last > -first else first, max(last, -first) + 1)
        if self.rope.max_seq_len is None or self.rope.remake is not None:
            raise ValueError(
                f"seq_len: expected the length of the longest sequence, because the host does not wait for {name} on "
                f"{given.device}, got None"
            )
        return self.rope.max_seq_len

    def _checked(self, name: str, position: int, seq_len: int) -> int:
        """``seq_len``, unless a position is so far away that it can only be garbage."""
        most = max(MOST_UNSAID, self.rope.max_seq_len or 0)
        if seq_len > most:
            raise ValueError(
                f"{name}: expected |positions| below {most} (pass seq_len for longer sequences), got {position}"
            )
        return seq_len

    def __getstate__(self) -> dict:
        """The state without tables: a copy makes its tables when it needs them."""
        return self.__dict__ | {"_tables": {}}

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        return f"rotary_dim={self.rope.rotary_dim}, layout={self.rope.layout!r}, seq_format={self.seq_format!r}"


class _Tables:
    """The tables of one rotation on one device, and the axis of each column."""

    def __init__(self, rope: Rope, rows: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.lengths = rows, rope.lengths
        self.cos, self.sin = frequency_tables(
            rope.inverse_frequencies, rows, rope.attention_factor, dtype=dtype, device=device
        )
        self.axes = rope.axes


_shared: WeakValueDictionary[tuple, _Tables] = WeakValueDictionary()


def _shared_tables(rope: Rope, seq_len: int, dtype: torch.dtype, device: torch.device) -> _Tables:
    """Tables of at least ``seq_len`` rows, the same object for all modules that rotate alike."""
    key = tuple(rope.inverse_frequencies.tolist()), rope.attention_factor, rope.axes, rope.lengths, dtype, device
    tables = _shared.get(key)
    if tables is None or tables.rows < seq_len:
        rows = max(FEWEST_ROWS, 1 << (seq_len - 1).bit_length())
        # The first caller may be in inference mode or under a transform of torch.func. Later callers need plain
        # tensors.
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
            tables = _Tables(rope, rows, dtype, device)
        if type(tables.cos) is torch.Tensor:
            _shared[key] = tables
    return tables


def _unscaled(head_dim: int, base: float, layout: Layout) -> Rope:
    """The rotation of all ``head_dim`` features by unscaled frequencies."""
    if not hasattr(head_dim, "__index__") or isinstance(head_dim, (bool, torch.Tensor)):
        hint = "" if isinstance(head_dim, (bool, float, str, torch.Tensor)) else ": see RotaryEmbedding.from_config"
        raise TypeError(f"rope: expected a head_dim or a Rope, got {shown(head_dim)}{hint}")
    return Rope(inverse_frequencies(check_rotary_dim(head_dim, "rope"), base), head_dim=head_dim, layout=layout)


def _within(seq_len: int, lengths: range) -> bool:
    # Compilers cannot follow `in`, nor a comparison that is an entry of a key (torch 2.14).
    if lengths.start <= seq_len < lengths.stop:
        return True
    return False


def _rows(seq_len: int) -> int:
    """``seq_len`` as an int, at most the largest number of rows of a table."""
    seq_len = integer("seq_len", seq_len)
    if not 0 <= seq_len <= MOST_ROWS:
        raise ValueError(f"seq_len: expected a number of tokens up to 2**31, got {seq_len}")
    return seq_len
