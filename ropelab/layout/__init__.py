"""The layout of a tensor: the two features that form a pair, and the order of the axes.

Read the files in this order:

1. `pairing` says which two features form a pair, and holds the permutation between the two layouts.
2. `seq_format` says which axis of a tensor is the batch, the sequence, the heads and the features of a head.
3. `weights` converts the weights of a model from one layout to the other.
"""
