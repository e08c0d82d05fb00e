"""Name the code that the launches of kernels reach: each function, class and constant, with its hash."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropelab.bench import code_hash, replaced
from ropelab.kernels import HAS_TRITON

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_SOURCES = code_hash.of_folder(KERNELS)
_PACKAGE = "ropelab.kernels"
_NOTING: list[set[str]] = []
"""What the contexts of `noted` have found so far, the innermost last."""


@contextmanager
def noted() -> Iterator[set[str]]:
    """Note the kernels of this project that Triton compiles, or loads, within the context, as ``"module.function"``.

    A process loads a kernel once, so the context belongs around all that a process launches. Another process notes its
    own kernels, and `note` adds them here.
    """
    found: set[str] = set()
    if not HAS_TRITON:
        yield found
        return
    from triton.compiler import CompiledKernel

    init = CompiledKernel.__init__

    def made(kernel: Any, source: Any, *arguments: Any, **options: Any) -> None:
        init(kernel, source, *arguments, **options)
        module = getattr(getattr(source, "fn", None), "__module__", "")
        if module.startswith(f"{_PACKAGE}."):
            found.add(f"{module.removeprefix(f'{_PACKAGE}.')}.{source.fn.__name__}")

    _NOTING.append(found)
    try:
        with replaced.attributes(CompiledKernel, __init__=made):
            yield found
    finally:
        _NOTING[:] = [each for each in _NOTING if each is not found]


def note(kernels: Iterable[str]) -> None:
    """Add kernels that another process has noted to those of the innermost context of `noted`, if there is one."""
    if _NOTING:
        _NOTING[-1].update(kernels)


def reached(kernels: Iterable[str], read: code_hash.Read = _SOURCES) -> dict[str, str]:
    """The hash of each definition that the kernels reach, the kernels among them.

    Args:
        kernels: as ``"rotate_triton._rotate_kernel"``.
        read: the sources of `ropelab.kernels`.

    Returns:
        ``"module.name"`` -> 16 hexadecimal digits, which depend on the code and not on comments and docstrings. A
        kernel that is not there has ``""``.
    """
    kernels = [*kernels]
    return dict.fromkeys(kernels, "") | code_hash.reached(kernels, read, _PACKAGE)


def changed(
    kernels: Mapping[str, str], same_code: Mapping[str, Iterable[str]], read: code_hash.Read = _SOURCES
) -> list[str]:
    """The names whose code is another one in the sources that ``read`` gives, or is not there; or else those that the
    kernels reach since.

    Args:
        kernels: as `reached` returns them.
        same_code: name -> hashes of code from which the compiler makes one machine code, ``""`` for code that is not
            reached. They say nothing of a name whose code of today is not among them.
    """
    today = reached(kernels, read)

    def is_other(name: str) -> bool:
        hashes = {kernels.get(name, ""), today[name]}
        return len(hashes) > 1 and not hashes <= {*same_code.get(name, ())}

    return [name for name in kernels if is_other(name)] or [name for name in today if is_other(name)]
