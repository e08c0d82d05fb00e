"""This topic shows what the laws find in published implementations."""
