"""Put the records of several GPUs into one table, with a name for each GPU."""

import textwrap

import pandas as pd

from ropelab.bench import records
from ropelab.study.plots.panels import BETWEEN_RECORDS

_LETTERS = 96
"""The letters of a line below a figure of 5.6 inches."""


def short(gpu: str) -> str:
    """``"NVIDIA H100 80GB HBM3"`` -> ``"H100"``; another name stays as it is."""
    name = gpu.removeprefix("NVIDIA ")
    return gpu if name == gpu else name.split()[0]


def together(study: str, where: records.Where) -> tuple[pd.DataFrame, str]:
    """The tables of a study from every GPU, with the column ``gpu``, and the footer of a figure of them.

    Raises:
        Unusable: as `records.of_each_gpu`.
    """
    found = records.of_each_gpu(study, where)
    frames = [record.frame.assign(gpu=short(record.provenance["gpu"]["name"])) for record in found]
    return pd.concat(frames, ignore_index=True), BETWEEN_RECORDS.join(map(_footer, found))


def _footer(record: records.Record) -> str:
    """The footer of a record, in lines that fit below a narrow figure."""
    name, *facts = record.footer.split(" · ")
    return BETWEEN_RECORDS.join(textwrap.wrap(" · ".join([short(name), *facts]), _LETTERS))
