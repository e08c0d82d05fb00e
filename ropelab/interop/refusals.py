"""Give the adapters `renamed`, which puts the error messages of ropelab's functions into their words."""

from ropelab.call.refusals import renamed

__all__ = ["renamed"]
