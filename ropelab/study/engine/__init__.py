"""The engine turns evidence into verdicts; it knows no document.

- `verdict`: the two axes of a verdict, outcome and basis
- `noise`: the interval of a measured number
- `repeats`: how far the times of two runs lie apart
- `judging`: the rules that lead from intervals to an outcome, each written once
- `ledger`: claims, their evidence and their verdicts in one table
"""
