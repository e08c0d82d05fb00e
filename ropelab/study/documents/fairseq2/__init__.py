"""fairseq2#1213: both layouts in ``RotaryEncoder`` and in ``ReferenceRotaryEncoder``, and which should be the default.

``peers`` loads fairseq2 itself, and ``encoders`` has the encoders under study. ``evidence`` reads the document's log
and computes the evidence that needs no GPU. ``measure`` makes the records, ``rules`` judges, and ``figures`` draws.
"""
