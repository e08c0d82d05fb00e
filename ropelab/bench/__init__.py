"""Measuring: workloads, timing, the roof, other people's kernels, records with provenance."""
