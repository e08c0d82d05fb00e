"""DeepSpeed#8052: torchembed as a RoPE backend of ``deepspeed.sequence.layer.apply_rotary_pos_emb``.

``dispatch`` states the function under study, ``measure`` makes the records, ``rules`` judges what is
more than a comparison, and ``peers`` loads the packages.
"""
