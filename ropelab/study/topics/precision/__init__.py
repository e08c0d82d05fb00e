"""This topic shows what each way to compute cosines and sines loses."""
