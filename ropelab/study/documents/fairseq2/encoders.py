"""The encoders under study: the pull request's own, or our models where its file is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropelab.bench.packages import NotInstalled
from ropelab.interop.fairseq2 import BatchLayout
from ropelab.study.documents.fairseq2 import models, peers

ENCODER_CODE = "encoder_code"
"""The column that says which code ran: `Encoders.source`, in every row with a contender of the document."""

MODEL = "our model"


@dataclass(frozen=True)
class Encoders:
    """The two classes of the document, and the class that describes their batches.

    Attributes:
        source: the version and checksum of the code, or `MODEL`.
        classes: "RE" and "RRE" -> ``RotaryEncoder`` and ``ReferenceRotaryEncoder``.
        batch_layout: a class whose call is ``batch_layout(shape, seq_lens, *, packed=False, device=None)``.
    """

    source: str
    classes: Mapping[str, type]
    batch_layout: type


MODELS = Encoders(MODEL, {"RE": models.RotaryEncoder, "RRE": models.ReferenceRotaryEncoder}, BatchLayout)


def proposed() -> Encoders:
    """The pull request's own encoders.

    Raises:
        ropelab.bench.packages.NotInstalled: a file of the pull request's commit is not under ``build/peers``.
    """
    code = peers.proposed()
    return Encoders(code.source, {"RE": code.RotaryEncoder, "RRE": code.ReferenceRotaryEncoder}, code.BatchLayout)


def under_study() -> Encoders:
    """The pull request's own encoders, or our models."""
    try:
        return proposed()
    except NotInstalled:
        return MODELS
