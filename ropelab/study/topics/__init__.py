"""The analyses that belong to no document."""
