"""The tables of README.md, computed from the records; a test compares them with what the file says."""

import tempfile
from pathlib import Path

import pandas as pd

from ropelab.bench import records
from ropelab.study import comparison, verdicts

README = records.ROOT / "README.md"
GPU = "nvidia-h200"
"""Whose records README.md shows, whatever GPU is at hand."""


def tables() -> dict[str, str]:
    """Name -> markdown, to stand in README.md between ``<!-- name -->`` and ``<!-- end -->``."""
    with tempfile.TemporaryDirectory() as directory:
        only = Path(directory)
        (only / GPU).symlink_to(records.MEASUREMENTS / GPU)
        return {"speed": _speed(record()), "claims": _claims(only)}


def record() -> records.Record:
    """The record behind the table of speeds."""
    return records.load("dense", gpu=GPU)


def update(readme: Path = README) -> None:
    """Write the tables into the file."""
    text = readme.read_text()
    for name, table in tables().items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}<!-- {name} -->\n{table}<!-- end -->{after}"
    readme.write_text(text)


def _speed(record: records.Record) -> str:
    """Smallest fraction of the copy over layouts and directions, ours and the best of each peer family."""
    times = comparison.timed(record.frame)
    columns = {
        "ropelab": ["ropelab"],
        "torch.compile": ["hf_compiled"],
        "Liger (in place)": ["liger"],
        "flash-attn": ["flash_attn"],
        "torchembed": ["torchembed 0.3.2"],
        "eager": ["hf_eager"],
    }
    lines = [
        f"Measured on {record.footer} (record of {record.provenance['utc']}).",
        "",
        "| batch x tokens, q/k heads, head_dim | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for cell, rows in times.groupby("cell", sort=False):
        fractions = [rows[rows.contender.isin(names)].fraction_of_copy for names in columns.values()]
        lines.append(f"| {cell} | " + " | ".join(map(_range, fractions)) + " |")
    return "\n".join(lines) + "\n"


def _claims(directory: Path) -> str:
    ledger = verdicts.ledger(records=directory)
    lines = ["| claim | in our words | verdict |", "|---|---|---|"]
    lines += [f"| {row.id} | {row.statement} | {row.verdict} |" for row in ledger.itertuples()]
    return "\n".join(lines) + "\n"


def _range(values: pd.Series) -> str:
    if values.empty:
        return ""
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    update()
