"""The encoders under study: the pull request's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropelab.study.documents.fairseq2 import peers

ENCODER_CODE = "encoder_code"
"""The column that says which code ran: `Encoders.source`, in every row with a contender of the document."""


@dataclass(frozen=True)
class Encoders:
    """The two classes of the document, and the class that describes their batches.

    Attributes:
        source: the version and checksum of the code.
        classes: "RE" and "RRE" -> ``RotaryEncoder`` and ``ReferenceRotaryEncoder``.
        batch_layout: a class whose call is ``batch_layout(shape, seq_lens, *, packed=False, device=None)``.
    """

    source: str
    classes: Mapping[str, type]
    batch_layout: type


def proposed() -> Encoders:
    """The pull request's own encoders.

    Raises:
        Unavailable: a file of the pull request's commit is not under ``build/peers``.
    """
    code = peers.proposed()
    return Encoders(code.source, {"RE": code.RotaryEncoder, "RRE": code.ReferenceRotaryEncoder}, code.BatchLayout)
