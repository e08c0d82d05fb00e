"""Hold whole models to laws: the function that rotates, and the attention around it.

Read the files in this order:

1. `configs` shrinks a configuration, and `factory` builds a tiny random model of any architecture of Transformers.
2. `trace` watches a call of a model, and finds the functions that rotate by what they return.
3. `function_laws` checks such a function by the laws of `ropelab verify`, and `replay` a method, or a function whose
   parameters follow no known convention.
4. `attention_laws` checks the model by laws about positions, distances, caches and packed sequences.
5. `verify_model` puts both together.
"""

from ropelab.conformance.models.verify_model import ModelReport, verify_model

__all__ = ["ModelReport", "verify_model"]
