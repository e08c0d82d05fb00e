"""Hold somebody's frequencies, tables or rotation to the configuration of a model.

Read the files in this order:

1. `descriptions` brings the descriptions of vLLM, SGLang and llama.cpp into the form that `rope_from_config` reads.
2. `measured` asks a tensor, a module or a function for cosines and sines.
3. `readings` reads the configuration with each key left out, applied twice or exchanged.
4. `verify_config` compares, and says which key was read wrongly.
"""

from ropelab.conformance.configuration.verify_config import ConfigReport, Finding, verify_config

__all__ = ["ConfigReport", "Finding", "verify_config"]
"""The public names."""
