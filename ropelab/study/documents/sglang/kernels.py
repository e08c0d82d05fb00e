"""Call the operator of SGLang#14302 as published, in each state that the document speaks of.

The project does not contain the operator's code. `STATES` says where each state is published. A library with the
published kernels and their published host code lies in ``build/peers/compiled/sglang-14302-<commit>-sm_<cc>.so``. Its
C interface takes pointers and sizes, so the library needs no torch.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ropelab.bench import packages

REPOSITORY = "sgl-project/sglang"
_AHEAD = "sgl-kernel/csrc/{}/rotary_embedding.cu"
_JUST_IN_TIME = "python/sglang/jit_kernel/csrc/rotary_embedding_cos_sin.cuh"

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, bool], None]
"""The signature ``operator(cos, sin, query, key, head_size, adjacent)``, in place on a CUDA GPU.

query and key are ``[T, H D]`` or ``[T, H, D]``, contiguous; cos and sin have the dtype of query and key. For adjacent
pairs a table is ``[T, R/2]``, a column for each pair. For halves a table is ``[T, R]``, a column for each feature.
"""


@dataclass(frozen=True)
class State:
    """A state of the operator's source.

    Attributes:
        commit, path: where the source is published, in `REPOSITORY`.
    """

    commit: str
    path: str

    @property
    def published(self) -> str:
        """The place of the source in words."""
        return f"{REPOSITORY} at {self.commit[:9]}: {self.path}"


STATES: dict[str, State] = {
    "first": State(
        "02f22ef8fc3ad2813a34a53a3d7a11152eab1e86", _AHEAD.format("multimodal"),
    ),
    "second": State(
        "ce00ef61751274807d4c462a68d242bb7bf56f16", _AHEAD.format("sgl_diffusion/rope"),
    ),
    "third": State(
        "d23edf281ff985e0b5690d620003ebbc55b33659", _AHEAD.format("sgl_diffusion/rope"),
    ),
    "just in time": State(
        "09e71354d65484f012c37242f94e4246fe2b2095", _JUST_IN_TIME,
    ),
    "last": State(
        "2d2d8c3f748c7ed1e7b08cc3a4c96a8360a05c69", _JUST_IN_TIME,
    ),
}  # fmt: skip
"""The name -> the state.

- ``first``: the state that the description speaks of: a block for each token, a pair for each thread and step.
- ``second``: the state of the comment of 2025-12-12, with a launch for up to 4 tokens.
- ``third``: the first state with 16-byte accesses, which copies a token's tables to shared memory.
- ``just in time``: the state of the comments of 2026-01-03, compiled for a number of pairs, without shared memory.
- ``last``: the last state before the review of 2026-01-15, which also takes positions.
"""

_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
_MESSAGE_BYTES = 1024


class _View(ctypes.Structure):
    """The structure in which the library takes a tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("contiguous", ctypes.c_int32),
        ("cuda", ctypes.c_int32),
    )


def operator(name: str) -> Operator:
    """The published operator in the state of that name.

    Raises:
        NotInstalled: there is no GPU, or no library of this state for the GPU.
    """
    library = _library(name)

    def rotate(cos, sin, query, key, head_size, adjacent):
        _call(library.rotate, cos, sin, query, key, head_size, int(adjacent))

    return rotate


def by_one_block(name: str, *, wide: bool = False) -> Operator:
    """The published kernel in the state of that name, by our launch: a block for each token, whatever their number.

    A block has as many threads as the published host code starts for one block a token. This operator takes
    bfloat16 ``[T, H, D]`` only; in the states ``just in time`` and ``last`` only heads of 128 features.

    Args:
        wide: 16-byte accesses; otherwise a thread rotates one pair at a time. The second state has no wide accesses.

    Raises:
        NotInstalled: as `operator`.
    """
    library = _library(name)

    def rotate(cos, sin, query, key, head_size, adjacent):
        _call(library.rotate_by_one_block, cos, sin, query, key, head_size, int(adjacent), int(wide))

    return rotate


@cache
def _library(name: str) -> ctypes.CDLL:
    state = STATES[name]
    path = packages.compiled(f"sglang-14302-{state.commit[:9]}", f"SGLang#14302 at {state.commit[:9]}")
    library = ctypes.CDLL(str(path))
    view, end = ctypes.POINTER(_View), (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    tensors = (view, view, view, view, ctypes.c_int64, ctypes.c_int)
    library.rotate.argtypes = (*tensors, *end)
    library.rotate.restype = ctypes.c_int
    if hasattr(library, "rotate_by_one_block"):
        library.rotate_by_one_block.argtypes = (*tensors, ctypes.c_int, *end)
        library.rotate_by_one_block.restype = ctypes.c_int
    return library


def _call(function: Callable[..., int], cos, sin, query, key, *options: int) -> None:
    """Call the function on the current stream, and raise RuntimeError with the published message if it refuses."""
    views = [None if x is None else ctypes.byref(_view(x)) for x in (cos, sin, query, key)]
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    with torch.cuda.device(query.device):
        stream = torch.cuda.current_stream().cuda_stream
        if function(*views, *options, stream, message, _MESSAGE_BYTES):
            raise RuntimeError(message.value.decode(errors="replace"))


def _view(x: torch.Tensor) -> _View:
    if x.ndim > 4:
        raise ValueError(f"tensor: expected at most 4 axes, got shape {tuple(x.shape)}")
    sizes = (ctypes.c_int64 * 4)(*x.shape)
    return _View(x.data_ptr(), sizes, x.ndim, _DTYPES.get(x.dtype, -1), x.is_contiguous(), x.is_cuda)
