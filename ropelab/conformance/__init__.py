"""The laws of rotary position embedding, held against anybody's implementation."""

from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.declared import Declaration, declare
from ropelab.conformance.laws import LAWS
from ropelab.conformance.result import ConformanceError, Counterexample, Report, Result
from ropelab.conformance.subject import Subject
from ropelab.conformance.testing import pytest_laws
from ropelab.conformance.verify import verify

__all__ = [
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
