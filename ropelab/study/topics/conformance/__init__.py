"""The faults that the laws find in published implementations."""
