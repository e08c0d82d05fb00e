"""Proofs by machine, and a reference that shares no code with the library."""
