"""The gradients of the rotation, for autograd and for compiled graphs."""
