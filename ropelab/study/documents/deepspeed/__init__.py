"""DeepSpeed#8052: torchembed as a RoPE backend of ``deepspeed.sequence.layer.apply_rotary_pos_emb``.

``dispatch`` states the function under study, ``measure`` makes the records, ``rules`` judges DS-01 to DS-17,
``peers`` loads the packages.
"""
