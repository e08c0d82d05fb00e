"""Decide whether an implementation of rotary position embedding is right, and if not, by which call it is wrong.

A function is checked against laws: properties that every right rotation has. A function keeps a law or breaks it. A
broken law comes with a counterexample. A function named ``check_...``, as everywhere in ropelab, raises an error for an
invalid argument.

Reading order:

- `case`: a call in terms that suit every convention. `tensors` copies its tensors.
- `bounds`: how far rounding may take a result from the exact rotation. `cache_bounds`: on its way into a cache.
- `implementation`: a function with the claims about it. `surroundings` keeps its global state from the laws.
- `convention`, `conventions`: how functions are called.
- `subject`: a function that takes cases, next to the exact results.
- `law`, `laws/`: the laws.
- `declared`: the claims about a function, checked.
- `verify`: checks a function against laws. `where` describes wrong elements.
- `result`, `words`, `report`: the outcome of one law, a broken law in words, the outcome of all laws, which
  `ropelab.command` writes; ``report.schema.json`` describes the report as JSON.
- `cache/`: the same for operators that rotate and write a paged cache: cases, conventions, laws.
- `angles`: recovers positions and frequencies from measured cosines and sines, for `models/` and `configuration/`.
- `configuration/`: checks frequencies, tables or a rotation against the configuration of a model.
- `testing`: the laws as a test for pytest.
- `child`: the tasks of the command ``ropelab``, which runs the function in a new process.
"""

from ropelab.conformance.cache import CACHE_CONVENTIONS, CACHE_LAWS
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.declared import Declaration, declare
from ropelab.conformance.laws import LAWS
from ropelab.conformance.report import ConformanceError, Report
from ropelab.conformance.result import Counterexample, Result
from ropelab.conformance.subject import Subject
from ropelab.conformance.testing import pytest_laws
from ropelab.conformance.verify import verify

__all__ = [
    "CACHE_CONVENTIONS",
    "CACHE_LAWS",
    "CONVENTIONS",
    "LAWS",
    "Case",
    "ConformanceError",
    "Counterexample",
    "Declaration",
    "NotApplicable",
    "Report",
    "Result",
    "Sizes",
    "Subject",
    "declare",
    "pytest_laws",
    "verify",
]
