"""The grammar of the figures, and the list of all figures.

``panels`` lays a figure out, ``marks``, ``heatmap`` and ``ticks`` draw in a panel, ``looks`` says colour and marker of
each contender, ``drawing`` selects rows of a record, ``registry`` knows every figure.
"""
