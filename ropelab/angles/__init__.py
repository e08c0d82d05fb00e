"""This room answers: by what angle does each pair of features turn?"""
