"""Call a subject under circumstances that change a wrong function and no right one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ropelab.conformance.case import Case
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Give torch's products of float32 matrices a precision: ``"highest"``, ``"high"`` or ``"medium"``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(subject: Subject, case: Case) -> Tensors:
    """Return the results of the case under autocast: to bfloat16, or to the dtype of the inputs if it has 16 bits."""
    dtype = case.inputs[0].dtype
    with torch.autocast(torch.device(subject.device).type, dtype if dtype.itemsize == 2 else torch.bfloat16):
        return subject(case)


def tf32(subject: Subject, case: Case) -> Tensors:
    """Return the results of the case where matrix products may take TF32."""
    with matmul_precision("high"):
        return subject(case)


def after_longer(subject: Subject, case: Case) -> Tensors:
    """Return the results of the case after a call with a longer sequence."""
    subject(replace(case, inputs=tuple(x.repeat(1, 4, 1, 1) for x in case.inputs)))
    return subject(case)
