"""Decide which module computes: a Triton kernel, or torch operations with the same results.

Triton is imported when a tensor needs it, so everything else works where Triton has no wheel (macOS, Windows).
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import ModuleType

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""Whether Triton interprets the kernels, on any device. Triton reads TRITON_INTERPRET when a kernel is defined."""

BACKENDS = ("torch", "triton")

forced: str | None = None
"""The backend that `use_backend` asks for, or None."""
_entered: dict[object, str] = {}
"""The contexts of `use_backend` that have not ended, in the order in which they began, and their backends."""
_lock = Lock()


def uses_triton(x: torch.Tensor) -> bool:
    """Whether a Triton kernel computes for ``x``: on a GPU, and anywhere under ``TRITON_INTERPRET=1``."""
    if forced is not None:
        return forced == "triton"
    return HAS_TRITON and (x.is_cuda or INTERPRETED)


def why_torch(x: torch.Tensor) -> str:
    """Why torch operations compute for ``x``; empty if a kernel does."""
    if uses_triton(x):
        return ""
    if forced == "torch":
        return "use_backend('torch') asks for them"
    return f"{x.device} is no GPU" if HAS_TRITON else "Triton is not installed"


def backend(operation: str, x: torch.Tensor) -> ModuleType:
    """The module that computes ``operation`` for ``x``.

    Args:
        operation: ``"rotate"``, ``"qk_norm"``, ``"paged_cache"``, ``"cached_keys"``, ``"latent"``,
            ``"block_scales"``, ``"projection"`` or ``"positions"``.
    """
    return importlib.import_module(f"ropelab.kernels.{operation}_{'triton' if uses_triton(x) else 'torch'}")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute with one backend on every device, in all threads of this process.

    Example: ``with use_backend("torch"): q = apply_rope(q, cos=cos, sin=sin)``.

    The context that began last decides until it ends, whichever thread began it.

    Args:
        name: ``"torch"``, or ``"triton"`` (tensors on a GPU, or ``TRITON_INTERPRET=1``).

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: an unknown name.
        RuntimeError: ``"triton"`` where Triton is not installed, or without a GPU and ``TRITON_INTERPRET=1``.
    """
    global forced
    if not isinstance(name, str):  # an array of one name equals it
        raise TypeError(f"name: expected one of {BACKENDS}, got {type(name).__name__}")
    if name not in BACKENDS:
        raise ValueError(f"name: expected one of {BACKENDS}, got {name!r}")
    if name == "triton" and not HAS_TRITON:
        raise RuntimeError("name: expected 'torch' where Triton is not installed, got 'triton'")
    if name == "triton" and not INTERPRETED and not torch.cuda.is_available():
        raise RuntimeError("name: expected 'torch' without a usable GPU and without TRITON_INTERPRET=1, got 'triton'")
    context = object()
    with _lock:
        _entered[context] = forced = name
    try:
        yield
    finally:
        with _lock:
            del _entered[context]
            forced = next(reversed(_entered.values()), None)
