"""This room answers: which position has this token?"""
