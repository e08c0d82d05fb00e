"""This room holds the analyses that belong to no document."""
