"""This topic shows the faults that the laws find in published implementations."""
