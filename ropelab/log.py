"""The debug log, which says of the first call of each kind what runs: ``ROPELAB_LOG=1``, or logging's own settings.

Calls that are like an earlier one are looked up, and write no line.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("ropelab")

if os.environ.get("ROPELAB_LOG", "0") not in ("", "0"):
    LOG.setLevel(logging.DEBUG)
    LOG.addHandler(logging.StreamHandler())  # stderr
    LOG.handlers[-1].setFormatter(logging.Formatter("%(name)s: %(message)s"))


def first_call(kernel: str, tensors: Mapping[str, Any], options: Any, path: str) -> None:
    """Log a call that is prepared.

    Args:
        kernel: the function of a module of `ropelab.kernels`.
        tensors: the tensors by name, heads as ``[B, S, H, D]``; None for those that the call lacks.
        options: the `Options` of the call.
        path: how it runs, and why no kernel does.
    """
    if LOG.isEnabledFor(logging.DEBUG):
        shown = (f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors.items() if x is not None)
        device = next(x.device for x in tensors.values() if x is not None)
        words = f"{options.layout}, {options.seq_format}"
        LOG.debug("%s on %s, %s: %s; %s", kernel, device, words, path, ", ".join(shown).replace("torch.", ""))
