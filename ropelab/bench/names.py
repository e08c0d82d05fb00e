"""What records call the contenders that several studies have, and the calls of the host."""

PREFIX = "copy: "
"""The name of every copy begins with this prefix."""

SAME_PLACES = "copy to the same places"
"""The contender in a record."""

NO_GRAD, PLAIN, RECORDED, BOTH = "no_grad", "plain tensors", "recorded", "forward and backward"
"""Calls under ``torch.no_grad()``; calls in grad mode with tensors that need no gradient; calls that autograd records,
because the tensors need a gradient; and such calls with their backward."""
CALLS = NO_GRAD, PLAIN, RECORDED, BOTH
