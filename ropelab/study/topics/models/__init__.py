"""Whether a model learns the same after the patch."""
