"""Put the published kernels in the place of their models, where a record has the published kernels."""

from collections.abc import Mapping

import pandas as pd

from ropelab.study.documents.sglang.kernel_contenders import PUBLISHED
from ropelab.study.engine.verdict import Basis


def judged(frame: pd.DataFrame, kernels: Mapping[str, str]) -> tuple[pd.DataFrame, Basis]:
    """The record with the rows of published kernels under the names of their models, and the basis of its evidence.

    Args:
        frame: a record, or several records together.
        kernels: the name of a model -> the name of the published kernel. A record that lacks one of the published
            kernels is returned as it is, because a comparison of models with kernels would compare Triton with CUDA.

    Returns:
        The table, and `Basis.CODE` if the published kernels are in it, else `Basis.MODEL`.
    """
    ran = frame[~frame.status.str.startswith("not run")]
    if not set(kernels.values()) <= set(ran.contender):
        return frame, Basis.MODEL
    published = [ran[ran.contender == name].assign(contender=model) for model, name in kernels.items()]
    return pd.concat([frame[~frame.contender.isin(kernels)], *published], ignore_index=True), Basis.CODE


def without_stand_ins(frame: pd.DataFrame) -> pd.DataFrame:
    """The record without the models whose published kernels were timed in it; the figures show these rows."""
    timed = set(frame.contender[frame.status == "ok"])
    return frame[~frame.contender.isin([model for model, name in PUBLISHED.items() if name in timed])]


def kernels_of(*models: str) -> dict[str, str]:
    """The part of `kernel_contenders.PUBLISHED` for these models."""
    return {model: PUBLISHED[model] for model in models}
