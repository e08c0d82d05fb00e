"""This room answers: which two features form a pair, and which axis of a tensor is which?"""
