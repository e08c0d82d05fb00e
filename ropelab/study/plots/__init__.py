"""What the figures of the chapters share.

``marks`` and ``ticks`` draw in axes, ``looks`` has the colour and the marker of each contender, and ``gpus`` puts the
records of several GPUs together.
"""
