"""Read the counters of Nsight Compute for the calls of ropelab that are furthest from their limits.

``python -m ropelab.bench.counters [STUDY...]`` needs Nsight Compute, and the records of the studies (all of
`worst_calls.OURS` by default) on the GPU at hand. It makes the record `RECORD`: the worst calls of each study with
their counters, each launched once with empty caches. Rows of other studies stay if the same code has made them. Each
GPU of the machine serves one study at a time.
"""

import json
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch

from ropelab.bench import cells, ncu, records, timing
from ropelab.bench.studies import STUDIES
from ropelab.bench.worst_calls import OURS, described, keys, worst

RECORD = "counters"
_SECTOR_BYTES, _LANES, _MOST_WARPS = 32, 32, 64
"""A sector, the threads of a warp, and the warps of a multiprocessor of compute capability 8.0 or 9.0."""
_MORE, _BUSY, _FEW_WARPS = 1.1, 80, 32
"""The bounds of `cause`: a quotient, percent of a peak, and warps."""
Wanted = Mapping[int, Mapping[str, int]]
"""The number of a call of `timing.gpu_times` -> contender -> the number of the range in which it is counted."""


def measure(studies: Sequence[str], directory: Path = records.MEASUREMENTS) -> None:
    """Count the worst calls of the studies on the GPUs at hand, and write the record after each study.

    Raises:
        RuntimeError: a study could not be counted; the others are in the record.
    """
    free: queue.Queue[str] = queue.Queue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    for gpu in visible.split(","):
        free.put(gpu)
    writes = threading.Lock()

    def count(study: str) -> None:
        gpu = free.get()
        try:
            found = _profiled(study, records.load(study, directory, gpu=records.here()).frame, gpu)
        finally:
            free.put(gpu)
        with writes:
            _record(study, found, directory)

    with ThreadPoolExecutor(free.qsize()) as pool:
        counting = {study: pool.submit(count, study) for study in studies}
    errors = {study: error for study, future in counting.items() if (error := future.exception())}
    if errors:
        told = [f"{study}: {type(error).__name__}: {error}" for study, error in errors.items()]
        raise RuntimeError("\n".join(["not counted:", *told]))


def _record(study: str, found: pd.DataFrame, directory: Path) -> None:
    """Write the record: the rows of this study, and the rows of others that the same commit and versions have made."""
    now, kept = records.environment(), pd.DataFrame()
    try:
        earlier = records.load(RECORD, directory, gpu=now["gpu"]["name"])
        if all(earlier.provenance[name] == now[name] for name in ("commit", "torch", "triton")):
            kept = earlier.frame[earlier.frame.study != study]
    except records.Unusable:
        pass
    frame = pd.concat([kept, found], ignore_index=True) if len(kept) else found
    frame = frame.sort_values("study", key=lambda names: names.map(list(OURS).index), kind="stable")
    why = "Nsight Compute launched them, in processes of its own"
    records.write(RECORD, frame, directory, parameters={"smoke": False}, kernels_unknown=why)
    print(f"  {study}: {len(found)} calls, {found.kernels.sum()} kernels", flush=True)


def _profiled(study: str, frame: pd.DataFrame, gpu: str) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as folder:
        plan, found = Path(folder, "plan.json"), Path(folder, "found.csv")
        calls = worst(study, frame)
        plan.write_text(json.dumps({"study": study, "calls": calls.attrs["calls"], "wanted": wanted(calls)}))
        counters = ncu.run(__spec__.name, ["--plan", plan, found], gpu)
        return table(study, calls, counters, pd.read_csv(found))


def wanted(calls: pd.DataFrame) -> dict[int, dict[str, int]]:
    """The ranges of `worst` calls: the range of a row is the row's place in the table."""
    found: dict[int, dict[str, int]] = {}
    for place, (call, contender) in enumerate(zip(calls.call, calls.contender, strict=True)):
        found.setdefault(int(call), {})[contender] = place
    return found


def prepared(study: Callable, calls: int, ranges: Wanted, count: Callable[[timing.Call, int], None]) -> pd.DataFrame:
    """Run the cells of a study that have wanted calls, and count the wanted contenders; nothing is timed.

    Args:
        study: a function that goes through its cells with `cells.progress`, and calls `timing.gpu_times` equally often
            in each cell.
        calls: the number of calls of `timing.gpu_times` in a whole run.
        count: a function of a call on one set of buffers and of the number of its range.

    Returns:
        The table of the study for these cells. The median of each row is the number of its call.

    Raises:
        ValueError: the cells do not fit the number of calls.
        RuntimeError: a wanted contender is not there, because it cannot run, or because its result is wrong.
    """
    coming: list[int] = []

    def chosen(cells: list) -> Iterator:
        each, rest = divmod(calls, len(cells))
        if rest or not each:
            raise ValueError(f"expected as many calls in each of {len(cells)} cells, got {calls} calls")
        for number, cell in enumerate(cells):
            coming[:] = range(number * each, (number + 1) * each)
            if not ranges.keys().isdisjoint(coming):
                yield cell

    def instead(contenders: Mapping[str, Callable[[], Sequence[timing.Call]]]) -> pd.DataFrame:
        number = coming.pop(0)
        for name, place in ranges.get(number, {}).items():
            if name not in contenders:
                raise RuntimeError(f"call {number}: expected the contender {name}, got {', '.join(contenders)}")
            count(contenders[name]()[0], place)
        times = dict.fromkeys(("median_us", "q20_us", "q80_us"), float(number))
        return pd.DataFrame([{"contender": name, "status": "ok", **times, "samples": 1} for name in contenders])

    with cells.chosen(chosen), timing.instead(instead):  # with one set of buffers
        return study()


def table(study: str, calls: pd.DataFrame, counters: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """The worst calls of a study with their counters and causes.

    Args:
        calls: the result of `worst`.
        counters: the result of `ncu.run`.
        found: the result of `prepared`.

    Columns: study; call, the columns that identify it, in words; contender, large, moved_bytes, fraction, median_us (of
        the record) and bytes_us, see `worst`; kernel, the longest, and kernels, their number; counted_us, the time of
        all kernels; dram_over_bytes and sectors_over_bytes, what memory and the L2 cache move over moved_bytes;
        `ncu.COLUMNS`, and warps_fit, the warps that fit a multiprocessor, and fits_by, the resource that limits them,
        of the longest kernel; stall, stall_share, second_stall and second_share, the two main reasons for which its
        warps issue nothing, and their shares of these warps; and cause.

    Raises:
        ValueError: a numbered call of the study is another call than that of the record, or has no counters.
    """
    ours = dict(zip(zip(found.median_us, found.contender, strict=True), keys(found), strict=True))
    kept = ["contender", "large", "moved_bytes", "fraction", "median_us", "bytes_us"]
    rows = []
    for place, (key, words) in enumerate(zip(keys(calls), described(calls), strict=True)):
        row, kernels = calls.iloc[place], counters[counters.range == place]
        if (other := ours.get((row.call, row.contender))) != key:
            raise ValueError(f"{study}, call {row.call}: expected the cell of the record, {key}, got {other}")
        if kernels.empty:
            raise ValueError(f"{study}, {words}, {row.contender}: expected counters, got none")
        rows.append({"study": study, "call": words, **row[kept], **_counted(kernels, row.moved_bytes)})
    frame = pd.DataFrame(rows)
    return frame.assign(cause=[cause(row) for _, row in frame.iterrows()])


def _counted(kernels: pd.DataFrame, moved_bytes: float) -> dict[str, object]:
    longest = kernels.loc[kernels[ncu.TIME].idxmax()]
    limit = longest[[*ncu.FITS]].astype(float).idxmin()
    stalls = pd.Series({reason: longest[ncu.stall(reason)] for reason in ncu.STALLS})
    (stall, share), (second, its_share) = (stalls / stalls.sum()).nlargest(2).items()
    return {
        "kernel": longest.kernel,
        "kernels": len(kernels),
        "counted_us": kernels[ncu.TIME].sum() / 1000,
        "dram_over_bytes": kernels[[ncu.READ, ncu.WRITTEN]].to_numpy().sum() / moved_bytes,
        "sectors_over_bytes": _SECTOR_BYTES * kernels[[*ncu.SECTORS]].to_numpy().sum() / moved_bytes,
        **{name: longest[metric] for name, metric in ncu.COLUMNS.items()},
        "warps_fit": longest[limit] * -(-longest[ncu.BLOCK] // _LANES),
        "fits_by": ncu.FITS[limit],
        "stall": stall, "stall_share": share, "second_stall": second, "second_share": its_share,
    }  # fmt: skip


def cause(row: pd.Series) -> str:
    """All that sets a call apart from a copy of its bytes at full speed, by fixed rules.

    - launch time: a small call takes more than twice as long as a large copy needs for as many bytes.
    - traffic: memory, or the L2 cache, moves more than 1.1 times the necessary bytes.
    - waves: whole waves of the grid are more than 1.1 times its waves, so multiprocessors are idle at its end.
    - occupancy: fewer than 32 of 64 warps fit a multiprocessor.
    - a unit is at 80 % of its peak or more: memory, the issue slots, the tensor cores.
    - the main reason for which warps issue nothing.
    """
    found = []
    if not row.large and row.median_us > 2 * row.bytes_us:
        found.append(f"launch time: the bytes take {row.bytes_us:.2g} of {row.median_us:.3g} µs")
    traffic = {"memory": row.dram_over_bytes, "the L2 cache": row.sectors_over_bytes}
    found += [f"{name} moves {times:.2f} times the bytes" for name, times in traffic.items() if times > _MORE]
    if -(-row.waves // 1) > _MORE * row.waves:
        found.append(f"the {'only' if row.waves < 1 else 'last'} wave is {row.waves % 1:.0%} full")
    if row.warps_fit < _FEW_WARPS:
        found.append(f"{row.fits_by} limit a multiprocessor to {row.warps_fit:.0f} of {_MOST_WARPS} warps")
    units = {"memory": row.dram_percent, "issue slots": row.issue_percent, "tensor cores": row.tensor_percent}
    found += [f"{name} at {percent:.0f} % of the peak" for name, percent in units.items() if percent >= _BUSY]
    return "; ".join([*found, f"{row.stall_share:.0%} of the waiting warps {ncu.STALLS[row.stall]}"])


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--plan"]:  # under Nsight Compute
        plan = json.loads(Path(arguments[1]).read_text())
        ranges = {int(call): names for call, names in plan["wanted"].items()}
        found = prepared(STUDIES[plan["study"]].table, plan["calls"], ranges, ncu.counted)
        found.to_csv(arguments[2], index=False)
    elif unknown := set(arguments) - OURS.keys():
        raise SystemExit(f"expected studies out of {', '.join(OURS)}, got {', '.join(sorted(unknown))}")
    else:
        measure(arguments or list(OURS))


if __name__ == "__main__":
    main(sys.argv[1:])
