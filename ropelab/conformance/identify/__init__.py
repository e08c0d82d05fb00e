"""Identification: measure the rotation of a wrong function, and describe its deviations from the definition.

A description is a set of deviations from the definition. The package knows no published fault and imports nothing from
the catalogue. Reading order:

- `questions`: the calls whose answers are explained.
- `plan`: the definition in parts that can deviate. `deviation`: one change of a plan, and the simulation.
- `matrix`, `angles`: measure matrices with basis vectors, and recover rows and frequencies.
- `measured`, `vocabulary`: deviations with measured parameters, and deviations without parameters.
- `evidence`, `scopes`, `search`: find the fewest deviations that reproduce all answers.
- `rare`: questions in other dtypes, on many tokens, and about results that a later call overwrites.
- `larger`: calls with larger extents, which refute what was fitted to the others.
- `plain`, `read_off`: facts about single answers that no description reproduces.
- `passed`: what becomes of a result that does not rotate, such as v beside q and k.
- `row_rules`, `stride_rules`: sentences about positions and memory that all measured rows and heads fit.
- `shared`: what becomes of an input that all heads share, and of its gradient.
- `feature_columns`: from which columns a function reads, where tables have a column for each feature.
- `dependence`: which inputs and which earlier calls a result depends on.
- `repair`: a change of the call that makes the function right.
- `identification`: the result.
"""

from ropelab.conformance.identify.dependence import recalls
from ropelab.conformance.identify.identification import Identification, identify

__all__ = ["Identification", "identify", "recalls"]
