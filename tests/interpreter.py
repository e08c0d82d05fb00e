"""Triton's interpreter without the work that it repeats or throws away: kernels compute the same bits in less time."""

from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Make the interpreter of this process faster, for good; the process must compile no kernel."""
    # The interpreter computes whether a sum or a product of integers overflows. It looks at the answer only if its
    # option debug is set, and nothing sets this option.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # The interpreter replaces the functions of the language at each launch and at each call of a device function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
