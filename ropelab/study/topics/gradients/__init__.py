"""Show how close the rotation comes to its bounds, and the effects of a wrong backward."""
