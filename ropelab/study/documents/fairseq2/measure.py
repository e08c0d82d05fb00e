"""The measurements on fairseq2#1213. A study returns a data frame, which ``ropelab.bench.records`` keeps.

The document states neither dtype nor direction. Here "forward" is a call without autograd, and "forward and backward"
is a call with autograd. The grid is in float32, and one large cell is also in bfloat16. The encoders are the pull
request's own classes at its commit (`ropelab.study.documents.fairseq2.encoders`); without them nothing is measured.
The column ``encoder_code`` says which code ran. An encoder serves the grid's longest sequence, as in a model.

Times are GPU time only, from CUDA graphs (`ropelab.bench.timing`). They do not include the host's time of an eager
call, which the document's figures of small cells include.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
import torch

from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import copies, in_parts, replaced, timing
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.fairseq2 import LAYOUTS, KernelRotaryEncoder, SeqsLayout
from ropelab.layout.pairing import pairs
from ropelab.study.documents.fairseq2 import evidence
from ropelab.study.documents.fairseq2.encoders import ENCODER_CODE, proposed
from ropelab.study.documents.fairseq2.evidence import DIRECTIONS, IMPLEMENTATIONS

NAMES = tuple(f"{name} {impl}" for name in ("RE", "RRE", "ropelab") for impl in LAYOUTS)
"""Contenders: class and ``impl``. The grid does not compile the kernel: either way it is one launch (``inductor``)."""

_MOST_SETS = 16  # the most sets of tensors: enough to keep the grid's smallest cell out of the cache of an H200
_CHECKED_TOKENS = 64  # the number of tokens that are checked at each end of every sequence
_HELD = 12  # the most float32 tensors that a contender's graph keeps, the tensors of its warm-up call included
_MOST_HELD = 16 * 2**30  # the most bytes of the graphs of contenders together: other studies need memory too


@dataclass(frozen=True)
class Cell:
    """One shape ``[batch, seq_len, encoding_dim]``, float32 or bfloat16."""

    batch: int
    seq_len: int
    encoding_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.seq_len, self.encoding_dim

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify the cell, and ``bytes``: the fewest bytes that a forward moves.

        The tables count as read once, with a column for each pair in float32. They count here because a head of E
        features is as wide as its rows of the tables.
        """
        elements = self.seq_len * self.encoding_dim
        return {
            "batch": self.batch, "seq_len": self.seq_len, "encoding_dim": self.encoding_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "bytes": elements * (2 * self.batch * self.dtype.itemsize + 4),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"B{self.batch} S{self.seq_len} E{self.encoding_dim}"


# The cells of one E follow each other, because each E has its own compiled code. Batches of 1 come last, because
# torch.compile always treats them apart.
GRID = tuple(Cell(b, s, e) for e, b, s in product((1024, 2048, 4096), (4, 8, 1), (2048, 4096, 16384)))
SMOKE_GRID = tuple(Cell(b, s, 64) for b, s in product((2, 1), (32, 64)))
"""Two cells with several batches, and two cells with one batch."""
LARGE = {False: Cell(4, 8192, 8192), True: Cell(2, 64, 64)}
"""Smoke -> the shape for which the document names two further kernels and their time."""


def grid(*, smoke: bool = False) -> pd.DataFrame:
    """GPU time of every encoder, eager and compiled, at the document's 27 shapes, in float32.

    The encoders are compiled as in a script that calls one model with several shapes: B and S are dynamic, and E is the
    model's. The layout of a batch has the width S as an int. torch.compile takes the int for a constant at first, and
    as dynamic from the second S on. So for each direction and E, an encoder is compiled for the first S, for all other
    S, and for batches of 1. The record ``inductor`` has static shapes.

    Returns:
        A row per cell, direction and contender: the columns of the cell, direction, mode ("eager", "compiled",
        "kernel", "copy"), contender, status, median_us, q20_us, q80_us, samples, and fraction_of_copy: the time of
        the best copy of the tensors that a direction must read, over the time of the contender. The forward must read
        x; with the backward a call must also read the cotangent.
    """
    cells = SMOKE_GRID if smoke else GRID
    if not timing.is_stopped():
        return _grid(cells, smoke)
    # Only the first cell of each kind is compiled for, because the others would only take memory.
    kinds = {(cell.encoding_dim, cell.batch > 1, cell.seq_len == cells[0].seq_len): cell for cell in cells[::-1]}
    first = [cell for cell in cells if cell in kinds.values()]
    parts = [[cell for cell in first if cell.encoding_dim == e] for e in {cell.encoding_dim: None for cell in cells}]
    return in_parts.compiled(_grid, [(part, smoke) for part in parts], here=smoke)


def _grid(cells: Sequence[Cell], smoke: bool) -> pd.DataFrame:
    longest = max(cell.seq_len for cell in (SMOKE_GRID if smoke else GRID))
    frames, encoders, compiled = [], {}, {}
    with torch._dynamo.config.patch(recompile_limit=64):  # two encoders share one function, and so its recompilations
        for cell in progress(cells, str):
            if not encoders or encoders[NAMES[0]].encoding_dim != cell.encoding_dim:
                torch._dynamo.reset()
                encoders.clear()
                compiled.clear()
                encoders |= _encoders(cell.encoding_dim, longest)
                compiled |= {
                    name: torch.compile(encoders[name], fullgraph=True)
                    for name in NAMES
                    if not name.startswith("ropelab")
                }
            contenders = _by_mode(encoders, compiled)
            for direction in DIRECTIONS:
                frames.append(_timed(cell, direction, contenders, _rounds(cell, smoke), dynamic=True))
    return pd.concat(frames, ignore_index=True)


def generated(*, smoke: bool = False) -> dict[tuple[str, ...], dict[str, object]]:
    """Inductor's code for each encoder at one large shape, compiled for that shape alone, in two dtypes.

    The encoders with our kernel are among them. In Inductor's code the kernel is an operator.

    Returns:
        (dtype, direction, contender) -> a mapping with these keys:

        - generated, fallbacks: the names of the kernels in Inductor's code, and of the operators that it leaves to
          eager
        - generated_bytes: the bytes that the generated kernels read and write, by Inductor's own account
        - code: a hash of the generated kernels without their names and comments
        - complex_warning, warnings: whether a warning of the compilation names complex numbers, and all warnings
    """
    found = {}
    for cell in _large_cells(smoke):
        _, contenders = _compiled_for(cell)
        for direction in progress(DIRECTIONS, f"{cell} {cell.columns['dtype']}, {{}}".format):
            (call_with,) = _calls(cell, direction, sets=1)
            for (mode, name), encoder in contenders.items():
                if mode == "compiled":
                    key = cell.columns["dtype"], direction, name
                    found[key] = _facts(f"compiled {name}", _generated, partial(call_with, encoder))
            del call_with
    return found


def inductor(found: Mapping[tuple[str, ...], dict[str, object]], *, smoke: bool = False) -> pd.DataFrame:
    """The time, the memory and the kernels of each encoder at the shape of ``generated``, eager and compiled.

    The columns of ``generated`` come from a compilation of their own, because code that comes from the cache is not
    seen.

    Args:
        found: the result of ``generated``.

    Returns:
        The columns of ``grid``, without the rows of the copies, and these columns:

        - kernels, launched: the number of kernels (copies and fills included) that a call runs on the GPU, and their
          names
        - peak_bytes, result_bytes: the memory of the call, the result included, and the memory of the result alone
        - state_bytes: the memory of the encoder's tables
        - the columns of ``generated``
    """
    frames = []
    for cell in _large_cells(smoke):
        encoders, contenders = _compiled_for(cell)
        state = {name: sum(b.nbytes for b in encoder.buffers()) for name, encoder in encoders.items()}
        for direction in progress(DIRECTIONS, f"{cell} {cell.columns['dtype']}, {{}}".format):
            times = _timed(cell, direction, contenders, _rounds(cell, smoke))
            times = times[times["mode"] != "copy"].reset_index(drop=True)
            (call_with,) = _calls(cell, direction, sets=1)
            facts = []
            for row in times.itertuples():
                encoder = contenders[row.mode, row.contender]
                ran = _facts(f"{row.mode} {row.contender}", _footprint, partial(call_with, encoder))
                made = found.get((row.dtype, row.direction, row.contender), {}) if row.mode == "compiled" else {}
                facts.append(ran | made | {"state_bytes": state[row.contender]})
            del call_with
            frames.append(pd.concat([times, pd.DataFrame(facts)], axis=1))
    return pd.concat(frames, ignore_index=True)


def _compiled_for(cell: Cell) -> tuple[dict[str, torch.nn.Module], dict[tuple[str, str], Callable]]:
    """The encoders by name, and the functions to call by mode and name; all compiled code is dropped first."""
    torch._dynamo.reset()
    encoders = _encoders(cell.encoding_dim, cell.seq_len)
    compiled = {name: torch.compile(encoder, dynamic=False, fullgraph=True) for name, encoder in encoders.items()}
    return encoders, _by_mode(encoders, compiled)


def _large_cells(smoke: bool) -> tuple[Cell, ...]:
    """The large shape in both dtypes. Each cell costs twelve compilations in either direction."""
    return tuple(Cell(*LARGE[smoke].shape, dtype) for dtype in (torch.float32, torch.bfloat16))


def reorderings(*, smoke: bool = False) -> pd.DataFrame:
    """Ways to write the reordering that RE needs for halves, compiled; forward, float32.

    The encoder is the one under study. Its two methods that reorder are its own in the first variant, and are replaced
    in the others.

    Returns:
        Columns of the cell, variant, status, median_us, q20_us, q80_us, samples, kernels, launched, generated,
        fallbacks, generated_bytes and code (see ``generated`` and ``inductor``), and encoder_code: which code ran.
        Times are means over several inputs, because the place of a tensor in memory affects the time.
    """
    cell = Cell(*LARGE[smoke].shape)
    torch._dynamo.reset()
    encoders = proposed()
    encoder = encoders.classes["RE"](cell.encoding_dim, cell.seq_len, device=_device(), impl="reference")
    layout = encoders.batch_layout(cell.shape[:2], None, device=_device())
    inputs = _tensors(cell, 3)
    expected = _forward(encoder, inputs[0], layout)
    contenders, facts, status = {}, {}, {}
    for name, reorder in REORDERINGS.items():
        compiled = torch.compile(_reordering_by(reorder, encoder), dynamic=False, fullgraph=True)
        calls = [partial(_forward, compiled, x, layout) for x in inputs]
        try:
            facts[name] = _generated(calls[0]) | _launched(calls[0])
            if torch.equal(calls[0](), expected):
                contenders[name] = lambda calls=calls: calls
            else:
                status[name] = "wrong: other bits than the encoder's"
        except Exception as error:  # a way that cannot run is a result too
            status[name] = timing.failure(error)
    del expected
    frame = tidy(_gpu_times(contenders, cell, _rounds(cell, smoke)), cell.columns, status)
    frame = frame.rename(columns={"contender": "variant"}).assign(**{ENCODER_CODE: encoders.source})
    columns = pd.DataFrame([facts.get(name, {}) for name in frame.variant])
    return pd.concat([frame, columns.drop(columns=["warnings", "complex_warning"], errors="ignore")], axis=1)


# ------------------------------------------------------------------------------------------------- the reordering


def _transposed(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    sizes = (2, -1) if source == "split_half" else (-1, 2)
    return x.unflatten(-1, sizes).transpose(-1, -2).flatten(-2)


def _concatenated(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    x0, x1 = pairs(x, source)
    if target == "split_half":
        return torch.cat((x0, x1), dim=-1)
    return torch.cat((x0.unsqueeze(-1), x1.unsqueeze(-1)), dim=-1).flatten(-2)


def _filled(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    y = torch.empty_like(x)
    for y_half, x_half in zip(pairs(y, target), pairs(x, source), strict=True):
        y_half.copy_(x_half)
    return y


REORDERINGS: dict[str, Callable[[torch.Tensor, str, str], torch.Tensor] | None] = {
    "stack, view, cat": None,
    "unflatten, transpose, flatten": _transposed,
    "unsqueeze, cat": _concatenated,
    "empty, filled": _filled,
}
"""Operators -> a function of x and the layouts before and after. The first is the pull request's own way."""


def _reordering_by(reorder: Callable | None, encoder: torch.nn.Module) -> torch.nn.Module:
    """The encoder with another way to reorder, over the same table."""
    found = copy.copy(encoder)
    if reorder is not None:
        found._split_to_consecutive_layout = lambda tensor: reorder(tensor, "split_half", "interleaved")
        found._consecutive_to_split_layout = lambda tensor: reorder(tensor, "interleaved", "split_half")
    return found


# ----------------------------------------------------------------------------------------------- what is compared


def _rounds(cell: Cell, smoke: bool) -> int:
    """The number of rounds. It is small where a call takes milliseconds, because the times of long calls vary least."""
    if smoke:
        return 2
    return 3 if math.prod(cell.shape) >= 2**28 else 5


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise Unavailable("the encoders are timed on a GPU")
    return torch.device("cuda")


def _encoders(encoding_dim: int, max_seq_len: int) -> dict[str, torch.nn.Module]:
    found = {}
    for name, encoder_class in (proposed().classes | {"ropelab": KernelRotaryEncoder}).items():
        for impl in LAYOUTS:
            found[f"{name} {impl}"] = encoder_class(encoding_dim, max_seq_len, impl=impl, device=_device())
    return found


def _by_mode(encoders: Mapping, compiled: Mapping) -> dict[tuple[str, str], Callable]:
    """(mode, contender) -> the function to call."""
    found = {("kernel" if name.startswith("ropelab") else "eager", name): e for name, e in encoders.items()}
    return found | {("compiled", name): encoder for name, encoder in compiled.items()}


def _tensors(cell: Cell, count: int) -> list[torch.Tensor]:
    return [torch.randn(cell.shape, device=_device(), dtype=cell.dtype) for _ in range(count)]


def _calls(cell: Cell, direction: str, sets: int, dynamic: bool = False) -> Iterator[Callable[[Callable], object]]:
    """For each set of buffers a function that calls a given encoder; ``dynamic`` marks B and S as dynamic."""
    layout = proposed().batch_layout(cell.shape[:2], None, device=_device())
    for _ in range(sets):
        x, *cotangent = _tensors(cell, 1 if direction == "forward" else 2)
        if cotangent:
            x.requires_grad_()
        if dynamic:
            for axis in (0, 1) if cell.batch > 1 else (1,):
                torch._dynamo.maybe_mark_dynamic(x, axis)
        if cotangent:
            yield partial(_with_backward, x=x, layout=layout, cotangent=cotangent[0])
        else:
            yield partial(_forward, x=x, layout=layout)


def _forward(encoder: Callable, x: torch.Tensor, layout: SeqsLayout) -> torch.Tensor:
    with torch.no_grad():
        return encoder(x, layout)


def _with_backward(encoder: Callable, x: torch.Tensor, layout: SeqsLayout, cotangent: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(encoder(x, layout), x, cotangent)
    return gradient


def _timed(
    cell: Cell, direction: str, contenders: Mapping[tuple[str, str], Callable], rounds: int, dynamic: bool = False
) -> pd.DataFrame:
    """Check the contenders, then time the right contenders and the copies.

    With the clock stopped, no eager encoder is called.
    """
    if timing.is_stopped():
        contenders = {(mode, name): encoder for (mode, name), encoder in contenders.items() if mode != "eager"}
    tensor_bytes = math.prod(cell.shape) * cell.dtype.itemsize
    sets = min(_MOST_SETS, max(1, math.ceil(2 * timing.cache_bytes() / tensor_bytes)))
    calls = list(_calls(cell, direction, sets, dynamic))
    ready, status = {}, {}
    for (mode, name), encoder in contenders.items():
        try:
            outcome = _check(calls[0], encoder, LAYOUTS[name.split()[1]], inverse=direction != "forward")
        except Exception as error:  # a contender that cannot run is a result too
            outcome = timing.failure(error)
        if outcome == "ok":
            ready[mode, name] = lambda encoder=encoder: [partial(call, encoder) for call in calls]
        else:
            status[mode, name] = outcome
    sources = [[v for n, v in call.keywords.items() if n in ("x", "cotangent")] for call in calls]
    ready |= {("copy", name): prepare for name, prepare in copies.contenders(sources).items()}
    frame = tidy(_gpu_times(ready, cell, rounds), cell.columns | {"direction": direction}, status)
    frame.insert(frame.columns.get_loc("contender"), "mode", [mode for mode, _ in frame.contender])
    frame["contender"] = [name for _, name in frame.contender]
    frame[ENCODER_CODE] = frame.contender.map(dict.fromkeys(IMPLEMENTATIONS, proposed().source))
    return copies.with_fraction(frame)


def _gpu_times(contenders: Mapping, cell: Cell, rounds: int) -> pd.DataFrame:
    """`timing.gpu_times`; contenders share their rounds as far as the memory of their graphs allows."""
    held = _HELD * math.prod(cell.shape) * 4
    together = max(1, int(min(_free_bytes() / 2, _MOST_HELD) / held))
    names = list(contenders)
    frames = []
    for start in range(0, len(names), together):
        part = {name: contenders[name] for name in names[start : start + together]}
        frames.append(timing.gpu_times(part, rounds=rounds, graph_ms=0.5))
        _empty_cache()  # frees the memory of the graphs
    return pd.concat(frames, ignore_index=True)


def _free_bytes() -> int:
    _empty_cache()
    return torch.cuda.mem_get_info()[0]


def _empty_cache() -> None:
    torch.cuda.empty_cache()


def _check(call: Callable, encoder: Callable, layout: str, inverse: bool) -> str:
    """``"ok"``, or how the first and last tokens of every sequence differ from the float64 definition.

    The tables are the encoder's own, from angles in float32. The angles are off by ``(3 |ln f| + 4) u |p f|``
    (`ropelab.conformance.conventions`), and library cosines by two units in the last place, 4 u. Two roundings of the
    arithmetic and one rounding of the result come on top, as in `ropelab.bench.peers.error_bound`.
    """
    result = call(encoder)
    x = call.keywords["cotangent" if inverse else "x"].detach()
    ends = torch.arange(x.shape[1], device=x.device)
    ends = torch.cat((ends[:_CHECKED_TOKENS], ends[_CHECKED_TOKENS:][-_CHECKED_TOKENS:]))
    result, x = result[:, ends].double(), x[:, ends].double()
    frequencies = inverse_frequencies(x.shape[-1]).to(x.device)
    angles = torch.outer(ends.double(), frequencies)
    truth = reference.rotate(x.unsqueeze(2), angles.cos(), angles.sin(), layout=layout, inverse=inverse).squeeze(2)
    u = torch.finfo(torch.float32).eps / 2
    stored = torch.finfo(call.keywords["x"].dtype).eps / 2
    off = torch.where(frequencies == 1, 0, u * angles * (3 * frequencies.log().abs() + 4))
    size = sum(x.abs() for x in pairs(x, layout))
    bound = 1.05 * (off + 6 * u + stored) * size + 4 * torch.finfo(call.keywords["x"].dtype).tiny
    error = (result - truth).abs()
    worst = torch.cat([e / bound for e in pairs(error, layout)]).max().item()
    if worst <= 1:
        return "ok"
    relative = (error.norm() / truth.norm()).item()
    return f"wrong: relative error {relative:.3g}, {worst:.3g} times its bound"


# ------------------------------------------------------------------------------------------ what the compiler makes


def _facts(what: str, find: Callable[[Callable], dict[str, object]], call: Callable) -> dict[str, object]:
    """The facts that ``find`` finds about the call. A contender that fails has no facts; its status says why."""
    try:
        return find(call)
    except Exception as error:
        print(f"    {what}: {timing.failure(error)}", file=sys.stderr, flush=True)
        return {}


def _footprint(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    return _launched(call) | {"peak_bytes": peak_bytes(call), "result_bytes": call().nbytes}


def _launched(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    names = kernel_names(call)
    return {"kernels": len(names), "launched": "; ".join(_short(name) for name in names)}


def _short(kernel: str) -> str:
    """A kernel's name, cut off after 97 characters because template arguments fill pages."""
    name = re.sub(r"^void ", "", kernel)
    return name if len(name) <= 100 else name[:97] + "..."


def _generated(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    """The facts of ``generated`` about a call that must not have been compiled before."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    _forget_warnings()
    with (
        warnings.catch_warnings(record=True) as caught,
        fresh_cache(),  # code that comes from the cache is not generated, and then not seen
        torch._inductor.config.patch(benchmark_kernel=True),  # writes the bytes of each kernel into the code
        replaced.attributes(torch._dynamo, reset=lambda: None),  # keeps the code that was compiled before
        contextlib.redirect_stderr(io.StringIO()),  # Inductor prints the path of every such module here
    ):
        warnings.simplefilter("always")
        _, codes = run_and_get_code(call)
    messages = list(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught))
    return read_code(codes) | {
        "complex_warning": any("complex" in message for message in messages),
        "warnings": "; ".join(messages),
    }


def _forget_warnings() -> None:
    """Make the next compilation warn of complex numbers again; Inductor warns of them once in a process."""
    import torch._inductor.lowering as lowering

    warn_once = getattr(lowering, "_warn_complex_not_supported", None)
    if hasattr(warn_once, "cache_clear"):
        warn_once.cache_clear()


_VIEWS = {
    "view", "view_as_complex", "view_as_real", "slice", "unsqueeze", "squeeze", "select", "_conj", "expand",
    "permute", "reshape", "alias", "as_strided", "detach",
}  # fmt: skip


def read_code(codes: Sequence[str]) -> dict[str, object]:
    """generated, fallbacks, generated_bytes and code (see ``generated``) of Inductor's wrapper code.

    Operators that only make a view are no fallbacks, because they run nothing.

    Args:
        codes: a piece of wrapper code for each direction.
    """
    launched, fallbacks, sources = [], [], {}
    for code in codes:
        sources |= dict(re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, flags=re.DOTALL))
        wrapper = re.sub(r"'''.*?'''", "", code, flags=re.DOTALL)  # the source of a kernel has a launch for timing
        launched += [
            (name, sources.get(name, "")) for name in re.findall(r"^\s*(\w+)\.run\(", wrapper, flags=re.MULTILINE)
        ]
        operators = re.findall(r"= torch\.ops\.(?:aten|prims)\.(\w+)\.\w+\(", wrapper)
        fallbacks += [name for name in operators if name not in _VIEWS]
    gigabytes = [re.search(r"'kernel_num_gb': ([\d.e-]+)", source) for _, source in launched]
    return {
        "generated": ", ".join(name for name, _ in launched),
        "fallbacks": ", ".join(fallbacks),
        "generated_bytes": round(1e9 * sum(float(g[1]) for g in gigabytes)) if all(gigabytes) else float("nan"),
        "code": hashlib.sha256("".join(_body(source) for _, source in launched).encode()).hexdigest()[:12],
    }


def _body(source: str) -> str:
    """A kernel without its name and comments, and without the code behind it, which launches it by name for timing."""
    body = "".join(re.findall(r"^@triton\.jit\ndef .*?(?=^\S|\Z)", source, flags=re.DOTALL | re.MULTILINE))
    return re.sub(r"#.*|\s+", " ", re.sub(r"def \w+\(", "def kernel(", body))


def defaults(*, smoke: bool = False) -> pd.DataFrame:
    """`evidence.defaults` as a record, for machines without fairseq2."""
    return evidence.defaults()


def equality(*, smoke: bool = False) -> pd.DataFrame:
    """`evidence.equality` as a record, for machines without the pull request's file."""
    return evidence.equality()
