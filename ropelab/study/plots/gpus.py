"""Put the records of several GPUs into one table, with a name for each GPU."""

import pandas as pd

from ropelab.bench import records


def short(gpu: str) -> str:
    """``"NVIDIA H100 80GB HBM3"`` -> ``"H100"``; another name stays as it is."""
    name = gpu.removeprefix("NVIDIA ")
    return gpu if name == gpu else name.split()[0]


def together(study: str, where: records.Where) -> pd.DataFrame:
    """The tables of a study from every GPU, with the column ``gpu``.

    Raises:
        Unusable: as `records.of_each_gpu`.
    """
    found = records.of_each_gpu(study, where)
    frames = [record.frame.assign(gpu=short(record.provenance["gpu"]["name"])) for record in found]
    return pd.concat(frames, ignore_index=True)
