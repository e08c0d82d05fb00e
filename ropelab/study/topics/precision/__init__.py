"""This topic shows the error of each way to compute cosines and sines."""
