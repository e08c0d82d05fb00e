"""Call the RoPE functions of TransformerEngine's C API in a shared library of the package.

The library comes out of a wheel, or out of an installation of the package; the package itself is not imported. The
signatures come from the headers ``transformer_engine/fused_rope.h`` and ``transformer_engine/transformer_engine.h`` of
the versions 2.18.0 and 2.20.2, which agree in all that is used here.

An error in the library is a C++ exception. An exception ends the process, because it would leave a C function. This
file therefore checks all that the library would refuse, and all that its 32-bit offsets cannot address.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from ropelab.bench import packages

DISTRIBUTION = "transformer-engine-cu13"
"""The wheel that contains the library, for CUDA 13."""
PLACES = ("transformer_engine/wheel_lib/libtransformer_engine.so", "transformer_engine/libtransformer_engine.so")
"""Where wheels, and builds from source, put the library."""

FORMATS = {"sbhd": 0, "bshd": 1, "thd": 2}
DTYPES = {torch.int32: 2, torch.float32: 4, torch.float16: 5, torch.bfloat16: 6}
_ROWWISE_DATA, _UNQUANTIZED = 0, 0

_TENSOR, _INT, _STREAM = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
_WHERE = (_INT, ctypes.c_bool, _INT, _INT)  # format, interleaved, cp_size, cp_rank
_ROPE = (*[_TENSOR] * 5, *_WHERE, *[_INT] * 9, _STREAM)
SIGNATURES: dict[str, tuple[tuple, type | None]] = {
    "nvte_create_tensor": ((_INT,), _TENSOR),
    "nvte_destroy_tensor": ((_TENSOR,), None),
    "nvte_set_tensor_param_v2": ((_TENSOR, _INT, ctypes.c_void_p, ctypes.c_size_t), None),
    "nvte_fused_rope_forward": (_ROPE, None),
    "nvte_fused_rope_backward": (_ROPE, None),
    "nvte_fused_qkv_rope_forward": ((*[_TENSOR] * 7, *_WHERE, *[_INT] * 8, _STREAM), None),
    "nvte_fused_qkv_rope_backward": ((*[_TENSOR] * 6, *_WHERE, *[_INT] * 8, _STREAM), None),
}
"""Function -> the types of its arguments, and of its result."""

_MOST_BLOCKS_Y = 65535
_REFUSED = re.compile(
    r"^(?P<file>\S+): (?:cannot open shared object file|undefined symbol: .*, version (?P<other>\S+)$)"
)
"""The loader's words for a library that it does not find, or that does not belong to another library of a version."""


class _Shape(ctypes.Structure):
    _fields_ = [("data", ctypes.c_size_t * 15), ("ndim", ctypes.c_size_t)]


class _BasicTensor(ctypes.Structure):
    _fields_ = [("data_ptr", ctypes.c_void_p), ("dtype", _INT), ("shape", _Shape)]


def find(version: str) -> Path:
    """The library of a version of TransformerEngine: of the environment if it has this version, else of build/peers.

    Raises:
        NotInstalled: neither has the version.
    """
    for peers in (packages.PEERS / "none", packages.PEERS):  # the environment alone, then both
        with suppress(packages.NotInstalled):
            _, directory = packages.locate(DISTRIBUTION, version, peers)
            for place in PLACES:
                if (directory / place).is_file():
                    return directory / place
    raise packages.NotInstalled(f"{DISTRIBUTION} {version} with {PLACES[0]} not installed")


@cache
def load(file: Path) -> "Library":
    """The library in a file.

    Raises:
        NotInstalled: there is no GPU, or a library that this library needs is missing.
    """
    if not torch.cuda.is_available():
        raise packages.NotInstalled("TransformerEngine's CUDA kernels need a GPU")
    return Library(file)


class Library:
    """The RoPE functions of one library, each a function of tensors on a GPU that returns new, contiguous tensors.

    Attributes:
        file: the shared library.

    Raises:
        NotInstalled: a library that this library needs is missing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._c = ctypes.CDLL(str(file), handle=_opened(file))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = arguments, result

    def rotate(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        tensor_format: str,
        *,
        interleaved: bool = False,
        inverse: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> torch.Tensor:
        """Rotate one tensor by ``nvte_fused_rope_forward``, or by ``nvte_fused_rope_backward`` if ``inverse``.

        Args:
            x: ``[s, b, h, d]``, ``[b, s, h, d]`` or, for ``"thd"``, ``[T, h, d]``; float32, float16 or bfloat16; any
                strides. The inverse takes the cotangent.
            freqs: contiguous float32 ``[s2, 1, 1, d2]`` in rad, with ``s2 >= s * cp_size``; for ``"thd"``, a row for
                each position. The library does not check positions.
            cu_seqlens: int32 ``[n + 1]``, for ``"thd"`` alone: the boundaries of the whole sequences.
            start_positions: int32 ``[b]`` or ``[n]``: the position of the first token of each sequence.
            cp_size, cp_rank: ``x`` holds the chunks ``cp_rank`` and ``2 cp_size - 1 - cp_rank`` of each sequence.

        Returns:
            A new tensor. Rows past ``cu_seqlens[-1]`` are uninitialized.

        Raises:
            ValueError: an argument has another dtype, shape or device, or is too large for 32-bit offsets.
        """
        packed = tensor_format == "thd"
        _check("x", x, x, 3 if packed else 4, (torch.float32, torch.float16, torch.bfloat16))
        _check_freqs("freqs", freqs, x, x.shape[-1])
        if packed:
            if cu_seqlens is None:
                raise ValueError("cu_seqlens: expected a tensor for thd, got None")
            _check("cu_seqlens", cu_seqlens, x, 1, (torch.int32,))
            rows, sequences, strides = len(freqs), len(cu_seqlens) - 1, (x.stride(0), 0)
        else:
            s, b = (0, 1) if tensor_format == "sbhd" else (1, 0)
            rows, sequences, strides = x.shape[s], x.shape[b], (x.stride(s), x.stride(b))
            if rows * cp_size > len(freqs):
                raise ValueError(f"freqs: expected at least {rows * cp_size} rows, got {len(freqs)}")
        _check_starts(start_positions, x, sequences)
        launched = _blocks(x, rows, sequences, cp_size, cp_rank)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not launched:
            return y
        function = self._c.nvte_fused_rope_backward if inverse else self._c.nvte_fused_rope_forward
        numbers = (rows, sequences, *x.shape[-2:], freqs.shape[-1], *strides, x.stride(-2), x.stride(-1))
        with self._handles(x, cu_seqlens if packed else None, freqs, start_positions, y) as handles:
            function(*handles, FORMATS[tensor_format], interleaved, cp_size, cp_rank, *numbers, _stream(x))
        return y

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        q_freqs: torch.Tensor,
        k_freqs: torch.Tensor,
        widths: Sequence[int],
        tensor_format: str,
        *,
        interleaved: bool = False,
        start_positions: torch.Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate q and k of a packed qkv, and copy v, by ``nvte_fused_qkv_rope_forward``.

        With ``cp_size > 1`` the library ignores ``start_positions``.

        Args:
            qkv: contiguous ``[s, b, g, w]`` or ``[b, s, g, w]``; each of ``g`` groups holds query heads, a key head and
                a value head.
            q_freqs, k_freqs: as ``freqs`` of `rotate`, with the same number of columns.
            widths: the widths of the queries, the key and the value of a group; the last two are the head size.

        Returns:
            q ``[.., g * widths[0] / d, d]``, k and v ``[.., g, d]``.

        Raises:
            ValueError: as `rotate`, or the widths do not fit.
        """
        rows, sequences, numbers = _qkv_sizes(qkv, qkv.shape[-1], q_freqs, k_freqs, widths, tensor_format, cp_size)
        _check_starts(start_positions, qkv, sequences)
        launched = _blocks(qkv, rows, sequences, cp_size, cp_rank)
        lead, groups, d = qkv.shape[:2], qkv.shape[2], widths[1]
        heads = (groups * widths[0] // d, groups, groups)
        q, k, v = (torch.empty((*lead, count, d), dtype=qkv.dtype, device=qkv.device) for count in heads)
        if launched:
            where = FORMATS[tensor_format], interleaved, cp_size, cp_rank
            with self._handles(qkv, q_freqs, k_freqs, start_positions, q, k, v) as handles:
                self._c.nvte_fused_qkv_rope_forward(*handles, *where, *numbers, _stream(qkv))
        return q, k, v

    def rotate_qkv_backward(
        self,
        gradients: Sequence[torch.Tensor],
        q_freqs: torch.Tensor,
        k_freqs: torch.Tensor,
        widths: Sequence[int],
        tensor_format: str,
        *,
        interleaved: bool = False,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> torch.Tensor:
        """The gradient of qkv by ``nvte_fused_qkv_rope_backward``, which takes no start positions.

        Args:
            gradients: the contiguous cotangents of q, k and v, in the shapes of the results of `rotate_qkv`. The other
                arguments are as for `rotate_qkv`.
        """
        shape = (*gradients[1].shape[:3], sum(widths))
        gradient = torch.empty(shape, dtype=gradients[0].dtype, device=gradients[0].device)
        for name, given in zip(("q", "k", "v"), gradients, strict=True):
            _check(f"gradient of {name}", given, gradient, 4, (gradient.dtype,), contiguous=True)
        rows, sequences, numbers = _qkv_sizes(gradient, shape[-1], q_freqs, k_freqs, widths, tensor_format, cp_size)
        if _blocks(gradient, rows, sequences, cp_size, cp_rank):
            where = FORMATS[tensor_format], interleaved, cp_size, cp_rank
            with self._handles(*gradients, q_freqs, k_freqs, gradient) as handles:
                self._c.nvte_fused_qkv_rope_backward(*handles, *where, *numbers, _stream(gradient))
        return gradient

    @contextmanager
    def _handles(self, *tensors: torch.Tensor | None) -> Iterator[list[int]]:
        """A handle for each tensor, on the device of the first; a handle without data for None."""
        handles = []
        try:
            for tensor in tensors:
                handles.append(self._c.nvte_create_tensor(_UNQUANTIZED))
                basic = _basic(tensor)
                size = ctypes.sizeof(basic)
                self._c.nvte_set_tensor_param_v2(handles[-1], _ROWWISE_DATA, ctypes.byref(basic), size)
            with torch.cuda.device(tensors[0].device):
                yield handles
        finally:
            for handle in handles:
                self._c.nvte_destroy_tensor(handle)


def _basic(tensor: torch.Tensor | None) -> _BasicTensor:
    if tensor is None:
        return _BasicTensor(None, DTYPES[torch.float32], _Shape((0,), 1))
    shape = _Shape(tuple(tensor.shape), tensor.ndim)
    return _BasicTensor(tensor.data_ptr(), DTYPES[tensor.dtype], shape)


def _qkv_sizes(qkv, width, q_freqs, k_freqs, widths, tensor_format, cp_size) -> tuple[int, int, tuple[int, ...]]:
    """Rows, sequences, and the numbers that both functions for qkv take."""
    _check("qkv", qkv, qkv, 4, (torch.float32, torch.float16, torch.bfloat16), contiguous=True)
    d = widths[1]
    if len(widths) != 3 or sum(widths) != width or d < 1 or widths[0] % d or widths[2] != d:
        raise ValueError(f"widths: expected multiples (n d, d, d) whose sum is {width}, got {tuple(widths)}")
    s, b = (0, 1) if tensor_format == "sbhd" else (1, 0)
    rows, sequences = qkv.shape[s], qkv.shape[b]
    for name, freqs in (("q_freqs", q_freqs), ("k_freqs", k_freqs)):
        _check_freqs(name, freqs, qkv, d)
        if freqs.shape[-1] != q_freqs.shape[-1] or len(freqs) < rows * cp_size:
            expected = f"at least {rows * cp_size} rows of {q_freqs.shape[-1]}"
            raise ValueError(f"{name}: expected {expected}, got {tuple(freqs.shape)}")
    return rows, sequences, (rows, sequences, qkv.shape[2], d, q_freqs.shape[-1], *widths)


def _check(name: str, x: torch.Tensor, like: torch.Tensor, rank: int, dtypes, *, contiguous: bool = False) -> None:
    if x.ndim != rank or x.dtype not in dtypes or x.device != like.device or x.device.type != "cuda":
        expected = f"rank {rank} and {' or '.join(map(str, dtypes))} on one GPU"
        raise ValueError(f"{name}: expected {expected}, got {tuple(x.shape)}, {x.dtype} on {x.device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")


def _check_freqs(name: str, freqs: torch.Tensor, x: torch.Tensor, head_dim: int) -> None:
    _check(name, freqs, x, 4, (torch.float32,), contiguous=True)
    if freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2 or not 0 < freqs.shape[-1] <= head_dim:
        raise ValueError(f"{name}: expected [s2, 1, 1, d2] with d2 even and at most {head_dim}, got {freqs.shape}")


def _check_starts(starts: torch.Tensor | None, x: torch.Tensor, sequences: int) -> None:
    if starts is not None:
        _check("start_positions", starts, x, 1, (torch.int32,), contiguous=True)
        if len(starts) != sequences:
            raise ValueError(f"start_positions: expected shape ({sequences},), got {tuple(starts.shape)}")


def _blocks(x: torch.Tensor, rows: int, sequences: int, cp_size: int, cp_rank: int) -> bool:
    """Whether the launch has a block at all.

    Raises:
        ValueError: the grid or the offsets are too large, or the rank does not exist.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank: expected a rank below cp_size = {cp_size}, got {cp_rank}")
    if sequences > _MOST_BLOCKS_Y:
        raise ValueError(f"x: expected at most {_MOST_BLOCKS_Y:,} sequences, got {sequences:,}")
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if max(span, x.numel()) >= 2**31:
        raise ValueError(f"x: expected offsets below 2**31, got {max(span, x.numel()):,} elements")
    return bool(x.numel() and rows and sequences)


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _opened(file: Path) -> int:
    """The handle of the library in the file.

    The library names CUDA libraries that PyPI's wheels of torch bring in folders of their own. If the loader does not
    find a library, or finds a library that does not belong to those that the process has loaded, the library is loaded
    from there first. The library refers to functions that older CUDA libraries lack;
    RoPE calls none of them. Symbols are therefore looked up at their first use (``RTLD_LAZY``), and ``dlopen`` is
    called itself, because `ctypes.CDLL` adds ``RTLD_NOW``.
    """
    c = ctypes.CDLL(None)
    c.dlopen.restype, c.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    c.dlerror.restype = ctypes.c_char_p
    tried: set[Path] = set()

    def opened(path: Path, mode: int) -> int:
        while not (handle := c.dlopen(os.fsencode(path), mode | os.RTLD_LAZY)):
            reason = (c.dlerror() or b"").decode(errors="replace")
            refused = _REFUSED.match(reason)
            beside = next((place for place in _instead(refused) if place not in tried), None) if refused else None
            if beside is None:
                lacking = refused and not refused["other"]
                told = refused["file"] if lacking else reason.rpartition("/")[2]
                raise packages.NotInstalled(f"{file.name} does not load: {told}")
            tried.add(beside)
            opened(beside, os.RTLD_GLOBAL)
        return handle

    return opened(file, os.RTLD_LOCAL)


def _instead(refused: re.Match) -> Iterator[Path]:
    """The libraries to load before the loader looks again: one beside the library that the refused one needs."""
    name = Path(refused["file"]).name
    for loaded in _loaded(refused["other"]) if refused["other"] else ():
        if (loaded.parent / name).is_file():
            yield loaded.parent / name
    yield from _cuda_libraries(name)


def _loaded(name: str) -> Iterator[Path]:
    """Where the process has loaded a library of this name from."""
    with suppress(OSError):  # only Linux has this file
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        places = (line.split(maxsplit=5)[-1] for line in maps)
        yield from (Path(place) for place in dict.fromkeys(places) if place.endswith(f"/{name}"))


def _cuda_libraries(name: str) -> Iterator[Path]:
    """Where the environment of torch has a library of this name."""
    for folder in dict.fromkeys((Path(torch.__file__).parents[1], *map(Path, filter(None, sys.path)))):
        for pattern in ("nvidia/*/lib", "nvidia/lib", "torch/lib"):
            for place in sorted(folder.glob(pattern)):
                if (place / name).is_file():
                    yield place / name
