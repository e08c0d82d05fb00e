"""Check, prepare and launch a call."""
