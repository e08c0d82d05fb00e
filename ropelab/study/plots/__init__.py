"""The grammar of the figures, and the list of all figures.

``panels`` lays a figure out, and ``marks`` and ``ticks`` draw in a panel. ``looks`` has the colour and the marker of
each contender, ``drawing`` selects rows of a record, and ``registry`` lists every figure.
"""
