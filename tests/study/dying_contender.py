"""A rotation that ends its process, as a fault on a GPU may do. The processes of the study import this file."""

import os

import ropelab


def rotate(q, k=None, **options):
    """`ropelab.apply_rope`, without an empty batch."""
    if q.numel() == 0:
        os._exit(3)
    return ropelab.apply_rope(q, k, **options)
