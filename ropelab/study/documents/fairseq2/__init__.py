"""fairseq2#1213: both layouts in ``RotaryEncoder`` and in ``ReferenceRotaryEncoder``, and which should be the default.

``peers`` loads fairseq2 itself, ``models`` holds our models of its encoders, and ``encoders`` says whose encoders are
under study. ``evidence`` reads the document's log and computes the evidence that needs no GPU. ``measure`` makes the
records, ``rules`` judges, and ``figures`` draws.
"""
