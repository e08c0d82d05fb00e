"""Make cosines and sines of complex frequencies, and keep them for the next call.

A kernel wants contiguous rows of cosines and of sines. In complex numbers cosines and sines alternate, so both have to
be copied. A diffusion model hands the same frequencies to every block in every step, and one copy is enough.
"""

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ropelab.arguments import dtype_name, integer, tensor

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Entry:
    owner: weakref.ref
    version: int
    tables: Tables


class SplitTables:
    """Cosines and sines of complex frequencies, kept while the frequencies live and do not change.

    An entry belongs to a tensor, or to the tensor of which the frequencies are a view. The entry is used while this
    tensor lives, as long as torch counts no write to it, for frequencies at the same address with the same shape,
    strides, dtype, bit of conjugation and bit of negation, and on the same CUDA stream. A view that each call makes
    anew therefore finds its entry, and a new tensor at the address of a deleted tensor does not.

    The tables are made anew in every call

    - under ``torch.compile``, and for subclasses of tensors, which may have no memory;
    - for tensors of ``torch.inference_mode``, for which torch counts no writes;
    - while a CUDA graph is captured: the graph then makes its own tables, and rests on no memory of this object;
    - for frequencies that require a gradient.

    A write that torch does not count, through ``Tensor.data`` or a pointer, is not noticed: call `clear` after such a
    write.

    Args:
        most: the most entries. The entry that was not used for the longest time is dropped.

    Raises:
        TypeError, ValueError: ``most`` is not an integer of at least 0.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = integer("most", most, at_least=0)
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._lock = threading.RLock()  # a tensor may die, and its entries with it, while this thread holds the lock

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all tables."""
        with self._lock:
            self._entries.clear()

    def split(self, freqs: torch.Tensor) -> Tables:
        """The real and the imaginary part of ``freqs``, contiguous, and shared by the calls that find an entry.

        Raises:
            TypeError: ``freqs`` is not a complex tensor.
        """
        if not _countable(freqs):
            return _parts(freqs)
        owner = freqs if freqs._base is None else freqs._base
        stream = torch.cuda.current_stream(freqs.device).cuda_stream if freqs.is_cuda else None
        layout = tuple(freqs.shape), freqs.stride(), freqs.dtype, freqs.is_conj(), freqs.is_neg()
        key = id(owner), freqs.data_ptr(), *layout, freqs.device, stream
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.owner() is owner and entry.version == freqs._version:
                self._entries.move_to_end(key)
                return entry.tables
        version = freqs._version
        tables = _parts(freqs)
        with self._lock:
            self._entries[key] = _Entry(weakref.ref(owner, lambda _: self._drop(key)), version, tables)
            self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return tables

    def _drop(self, key: tuple) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.owner() is None:  # else a new tensor already has this place
                del self._entries[key]


def _parts(freqs: torch.Tensor) -> Tables:
    if not tensor("freqs", freqs).is_complex():
        raise TypeError(f"freqs: expected a complex tensor, got {dtype_name(freqs.dtype)}")
    freqs = freqs.resolve_conj().resolve_neg()  # a kernel reads memory, and sees neither bit
    return freqs.real.contiguous(), freqs.imag.contiguous()


def _countable(freqs: torch.Tensor) -> bool:
    """Whether an entry for these frequencies can be recognized, and noticed to be old."""
    if torch.compiler.is_compiling() or type(freqs) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if freqs.requires_grad or freqs.is_inference() or freqs.is_meta:
        return False
    return not (freqs.is_cuda and torch.cuda.is_current_stream_capturing())


KEPT = SplitTables()
"""The tables that `apply_rope_qk_inplace` keeps."""
