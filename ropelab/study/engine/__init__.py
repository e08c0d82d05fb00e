"""Turn evidence into verdicts and notebooks. The part that judges knows no document.

How a claim gets its verdict, in reading order:

- `claims`: the documents and their claims
- `verdict`: the two axes of a verdict, outcome and basis
- `noise`: the interval of a measured number
- `repeats`: how far the times of two runs lie apart
- `words`: numbers, ranges and lists as text
- `judging`: the rules that lead from intervals to an outcome, each written once
- `comparisons`: the tests of claims: a quantity, the cells of a grid, a limit
- `computed`: the evidence that a CPU computes
- `decisive`: the sentence that names the decisive numbers of a claim
- `roles`: whose code stands for a role in a record
- `ledger`: claims, their evidence and their verdicts in one table

Checks on the evidence:

- `kept`: every verdict with its figures, also for machines without published code
- `quotations`: whether the quotations are in the documents
- `provenance`: records compared with one another, with the list of peers and with the history

How the study runs:

- `measure`: every study on the GPU at hand; `tasks` has the order, `results` what a study found, and `unfinished` what
  an interrupted run has done
- `measuring_code`: the hashes beside the numbers of protocols
- `runner`, `parameters`, `findings`, `claims_view`: the notebooks
"""
