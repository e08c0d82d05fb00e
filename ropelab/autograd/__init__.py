"""This room answers: how is the rotation differentiated?"""
