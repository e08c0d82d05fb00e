"""Put the error messages of ropelab's functions into the words of an adapter."""

from ropelab.call.refusals import renamed

__all__ = ["renamed"]
