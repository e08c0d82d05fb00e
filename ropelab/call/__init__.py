"""This room answers: how is a call checked, prepared and launched?"""
