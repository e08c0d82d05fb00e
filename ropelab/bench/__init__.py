"""Measurements: workloads, timing, the copy as the limit, kernels of other packages, records with provenance."""
