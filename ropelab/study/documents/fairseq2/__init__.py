"""fairseq2#1213: both layouts in ``RotaryEncoder`` and in ``ReferenceRotaryEncoder``, and which should be the default.

``evidence`` reads the document's log and computes what a CPU can, ``measure`` makes the records, ``rules`` judges
FS-01 to FS-17, ``figures`` draws, ``peers`` loads fairseq2 itself. The encoders under study are
`ropelab.interop.fairseq2`.
"""
