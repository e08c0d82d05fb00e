"""The error of each way to compute cosines and sines."""
