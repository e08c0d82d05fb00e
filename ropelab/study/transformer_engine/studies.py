"""The records of this document and what measures each."""

from collections.abc import Callable

import pandas as pd

from ropelab.study.transformer_engine.layer import layer
from ropelab.study.transformer_engine.measure import kernels, parity, past_the_end

STUDIES: dict[str, Callable[..., pd.DataFrame]] = {
    "te_kernels": kernels,
    "te_layer": layer,
    "te_parity": parity,
    "te_past_the_end": past_the_end,
}
"""Study -> function of ``smoke``."""
