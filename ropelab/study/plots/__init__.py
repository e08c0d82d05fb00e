"""This room draws: the grammar of the figures, and the list of all figures."""
