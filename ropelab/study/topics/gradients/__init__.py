"""This topic shows how close the rotation comes to its bounds, and what a wrong backward does."""
