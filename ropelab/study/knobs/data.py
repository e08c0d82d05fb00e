"""Compute the data of each element: facts about models, and measured times from the committed records."""

import math
from collections.abc import Callable
from contextlib import suppress

import pandas as pd

from ropelab.angles.model_config import rope_from_config
from ropelab.bench import records
from ropelab.bench.model_cells import Cell, on_meta
from ropelab.bench.model_shapes import MODELS as MODEL_HEADS
from ropelab.bench.model_shapes import Model
from ropelab.bench.rows import are_copies, timed
from ropelab.bench.workloads import Workload
from ropelab.study.documents import transformer_engine
from ropelab.study.documents.transformer_engine import NEW, OLD
from ropelab.study.engine.record_links import table
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.topics.precision.models import MODELS

Data = dict[str, object]


def turn(where: records.Where = records.MEASUREMENTS) -> Data:
    """No data, because the element computes everything itself."""
    return {}


def precision(where: records.Where = records.MEASUREMENTS) -> Data:
    """``models``: the name of each model, the length of its longest context in tokens, and frequencies of its planes.

    Only planes that turn at the longest context count.
    """
    models = []
    for name, model in MODELS.items():
        rope = rope_from_config(model.config, layer_type=model.layer_type)
        frequencies = rope.at_length(rope.max_seq_len).inverse_frequencies
        models.append({"name": name, "length": rope.max_seq_len, "frequencies": frequencies[frequencies > 0].tolist()})
    return {"models": models}


def packing(where: records.Where = records.MEASUREMENTS) -> Data:
    """The times of packed sequences in the record ``te_kernels``: 32 heads of 128 features, forward and backward.

    Returns:
        A mapping with these keys:

        - ``cells``: n, longest, tokens (of the rank), rows (of the table of angles), and the time of each strategy in
          microseconds or None
        - ``fits``: live (us) and each (us for each row without a token), for the two strategies that start such rows
        - ``linear``: [n, us] of the new grid for ``most`` tokens
        - ``ropelab``: [tokens, us]
        - ``most``: the number of tokens of a packing that no ranks share
        - ``programs``: the number of programs that ropelab launches for a token
        - ``about``: the source of the grids, and the footer of the record
        - ``record``: the path of the record
    """
    record = records.load("te_kernels", where)
    times = transformer_engine.times(record.frame).rename(columns=STRATEGIES | {"n_seqs": "n", "freqs_len": "rows"})
    times = times.reindex(columns=["n", "longest", "tokens", "rows", "cp_size", *STRATEGIES.values()])
    whole = times[times.cp_size == 1]
    most = int(whole.tokens.max())
    cells = times.drop(columns="cp_size").astype(object)
    return {
        "cells": cells.where(cells.notna(), None).to_dict("records"),
        "fits": {"old": _fit(whole, "old", whole.rows), "flash": _fit(whole, "flash", whole.longest)},
        "linear": _medians(whole, "n", "linear"),
        "ropelab": _medians(times, "tokens", "ropelab"),
        "most": most,
        "programs": _programs(most) / most,
        "about": f"{transformer_engine.whose(record.frame)}; {record.footer}",
        "record": _path("te_kernels", where),
    }


STRATEGIES = {OLD: "old", NEW: "linear", "flash_attn": "flash", "ropelab": "ropelab"}
"""Contender of the record -> its name in the element."""


def _fit(cells: pd.DataFrame, strategy: str, rows: pd.Series) -> dict[str, float] | None:
    """The time of the live blocks, and the time of each row without a token, as the chapter fits them."""
    dead = cells.n * rows - cells.tokens
    times = cells[strategy]
    few, many = times[dead <= cells.tokens / 8].dropna(), dead > 4 * cells.tokens
    if few.empty or times[many].dropna().empty:
        return None
    return {"live": float(few.min()), "each": float(((times - few.min()) / dead)[many].median())}


def _medians(cells: pd.DataFrame, column: str, strategy: str) -> list[list[float]]:
    """Pairs ``[value of the column, median time]``, in the order of the values."""
    medians = cells.groupby(column)[strategy].median().dropna()
    return [[int(value), float(time)] for value, time in medians.items()]


def _programs(tokens: int) -> int:
    """The number of programs of ropelab's rotation of packed tokens of 32 heads."""
    workload = Workload("", 1, tokens, 32, 0, 128, 128, seq_format="thd", lengths=(tokens,))
    return math.prod(on_meta(Cell(Model("", 32, 0, 128, 128), workload, "token")).plan().grid)


def _path(study: str, where: records.Where) -> str:
    """The path of the table of a record, relative to the root of the checkout if the table lies in the checkout."""
    path = table(study, where).resolve()
    return path.relative_to(records.ROOT).as_posix() if path.is_relative_to(records.ROOT) else str(path)


COLUMNS = (
    "study", "operation", "contender", "direction", "tokens", "q", "k", "dim", "rotary", "dtype", "cache", "order",
    "layout", "us",
)  # fmt: skip
WORDS = "study", "operation", "contender", "direction", "dtype", "cache", "order", "layout"
"""The columns of words, of which there are few."""
OPERATIONS = {"QK norm, rotation, cache": "norm, rotation and cache", "rotation, cache": "rotation and cache"}
"""Operation of the record ``paged_cache`` -> its name in the element. Latent attention moves other bytes."""
ROOF = ("dense", "few_tokens", "formats", "qk_norm", "paged_cache")
COPIES = ("dense", "few_tokens", "formats", "packed")
"""Studies whose copies write as many bytes as they read."""


def roof(where: records.Where = records.MEASUREMENTS) -> Data:
    """The heads of published models, the fastest copies, and the times of all contenders whose results were right.

    Returns:
        A mapping with these keys; studies without a record are left out:

        - ``models``: name, q and k (heads), dim and rotary (features), interleaved
        - ``copies``: [bytes, us], in order
        - ``columns``, ``rows`` and ``words``: `COLUMNS`, and the rows with these columns, where a word is its place in
          ``words``
        - ``gpu``: the GPU of the records
        - ``records``: study -> the path of its table
    """
    found = {}
    for study in {**dict.fromkeys(ROOF), **dict.fromkeys(COPIES)}:
        with suppress(records.Missing):
            found[study] = records.load(study, where)
    if "dense" not in found:
        raise records.Missing(f"there is no record of the study dense in {where}")
    times = {study: timed(record.frame) for study, record in found.items()}
    copies = pd.concat(frame[are_copies(frame)] for study, frame in times.items() if study in COPIES)
    rows = pd.concat(_roof_rows(study, times[study]) for study in ROOF if study in times)
    words = {word: place for place, word in enumerate(pd.unique(rows[list(WORDS)].values.ravel()))}
    coded = rows.assign(**{name: rows[name].map(words) for name in WORDS})
    return {
        "models": [
            {"name": model.name, "q": model.q_heads, "k": model.k_heads, "dim": model.head_dim,
             "rotary": model.rotary_dim, "interleaved": model.interleaved} for model in MODEL_HEADS
        ],
        "copies": [[int(count), float(us)] for count, us in copies.groupby("bytes").median_us.min().items()],
        "columns": list(COLUMNS),
        "rows": coded[list(COLUMNS)].astype(object).values.tolist(),
        "words": list(words),
        "gpu": next(iter(found.values())).provenance["gpu"]["name"],
        "records": {study: _path(study, where) for study in found},
    }  # fmt: skip


def _roof_rows(study: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a record that are no copies, with the columns of `COLUMNS`."""
    frame = frame[~are_copies(frame)]
    frame = frame.rename(columns={"head_dim": "dim", "q_heads": "q", "k_heads": "k", "median_us": "us"})
    frame = frame.rename(columns={"rotary_dim": "rotary", "step": "direction"})
    if study == "paged_cache":  # the k_heads of this record count the heads of v too
        frame = frame[frame.operation.isin(OPERATIONS)].replace({"operation": OPERATIONS})
        frame = frame.assign(k=frame.k // 2, rotary=frame.dim, order="bshd", direction="forward")
    else:
        operation = "norm and rotation" if study == "qk_norm" else "rotation"
        order = frame.seq_format.where(frame.storage == "contiguous", frame.storage)
        frame = frame.assign(operation=operation, tokens=frame.batch * frame.seq_len, order=order, cache="")
    frame = frame[frame.direction.isin(("forward", "backward"))]
    return frame.assign(study=study, contender=frame.contender.map(CONTENDERS.label))


DATA: dict[str, Callable[[records.Where], Data]] = {
    "turn": turn, "precision": precision, "packing": packing, "roof": roof,
}  # fmt: skip
"""Element -> the function that computes its data from records, in a form that JSON can hold."""
