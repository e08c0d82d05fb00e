"""The position of each token, and the row of the tables that a position reads.

Read `packed` for packed sequences and context parallelism, then `axes` for positions along several axes. The rule from
token to row follows. `ropelab.kernels.place_triton` and `ropelab.kernels.rotate_torch` carry the rule out for the
rotation, `ropelab.axial_tables` for several axes, and `ropelab.reference` in the definition.

From token to position
    Without ``positions``, tokens count from ``offsets``, which is 0 by default: token ``t`` of sequence ``b`` has the
    position ``offsets + t``, or ``offsets[b] + t`` for a tensor. The sum has 64 bits, so an int32 offset does not wrap
    around. A sum beyond int64 wraps around to a position without a row. In ``thd`` all tokens count as one sequence.

    ``positions`` gives each token its position: ``[S]`` or ``[1, S]`` for all sequences, ``[B, S]`` for each sequence,
    ``[T]`` or ``[1, T]`` for ``thd``.

    ``PackedSequences.positions`` counts every sequence of ``thd`` from its own offset. Under context parallelism a
    token keeps the position that it has in the whole sequence. Tokens after the last sequence have ``NO_POSITION``. A
    position outside of ``-2**31 + 1 < p < 2**31`` becomes ``INVALID_POSITION``, and a wrong ``cu_seqlens`` makes all
    positions ``INVALID_POSITION``. `context_parallel_positions` gives the positions of one rank's share of dense
    sequences.

    With several axes a token has a position along each axis, and each pair reads the position along its axis: ``axes``
    says which. `ropelab.apply_rope` takes ``positions`` ``[axes, S]`` or ``[axes, B, S]``. `ropelab.axial_tables`
    gathers tables with a row for each token from them, and `apply_rope` counts from 0 in these.

From position to row
    Position ``p`` reads row ``|p|``, in the tables of its own batch where tables have a batch axis. For ``p < 0`` the
    sine is negated, so the token rotates the other way. Tables of ``P < 2**31`` rows have the positions ``-P < p < P``.
    Frequencies in place of tables need no row and have ``-2**31 + 1 < p < 2**31``. Positions of int64 are never
    narrowed to int32.

Positions without a row
    ``NO_POSITION`` (-2**31) says that a token has no position: all features of the token become zero, and so does the
    gradient of the token. An offset ``NO_POSITION`` gives ``NO_POSITION`` to all tokens of its sequence. A sum of an
    offset and a token that is -2**31 by chance is not ``NO_POSITION`` but a position without a row. With several axes,
    ``NO_POSITION`` along some of them makes zero only their pairs, and a token without a position along any axis has no
    position. `ropelab.axial_tables` makes zero the columns, so features that do not rotate stay.

    Every other position without a row makes cosines and sines NaN, so the features that rotate, or the pairs of the
    axis, become NaN. Nothing is
    read out of bounds. ``INVALID_POSITION`` (-2**31 + 1) never has a row.

The checks of the host
    For an integer offset of 0 or more, every call compares the last position with the number of rows, on any device.
    For ``positions`` and ``offsets`` in CPU memory, every call compares the contents with the number of rows. Both
    checks raise ValueError before the call writes anything. The host never reads ``positions`` and ``offsets`` on a
    GPU, because it would have to wait for the GPU. A negative integer offset counts as a tensor on the device of q.

    `PackedSequences` checks the contents of ``cu_seqlens`` and ``offsets`` in CPU memory at construction. Only
    `PackedSequences.check` checks them on a GPU, and waits. `ropelab.axial_tables` compares no positions with the
    number of rows: a position without a row gives NaN on any device.
"""
