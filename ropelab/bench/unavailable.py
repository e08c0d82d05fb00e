"""The error that says that this machine cannot run a measurement."""


class Unavailable(RuntimeError):
    """Raised where a measurement or a computation lacks a GPU or a package; a record may take its place."""
