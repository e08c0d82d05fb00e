"""Measure methods that need a GPU: tensor cores in TF32, and the sine of fast maths."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import torch
import triton
import triton.language as tl

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import timing
from ropelab.bench.cells import progress
from ropelab.bench.exact_waves import exact_waves
from ropelab.bench.study import Study
from ropelab.bench.unavailable import Unavailable
from ropelab.study.topics.precision import methods as precision
from ropelab.study.topics.precision.errors import SAMPLES, SMOKE_TOPS, TOPS, compare, octave
from ropelab.study.topics.precision.methods import FP32, METHODS, TF32, Bound, Method, Waves, from_angles, wave_error

ROTARY_DIM, BASE = 128, 5e5
"""The features and the base of Llama 3."""
EMULATED = "TF32, emulated"
COLUMNS = [
    "method", "position", "status", "angle_error", "angle_bound", "output_error", "output_bound", "fraction", "ulps",
    "emulated",
]  # fmt: skip


def precision_study(*, smoke: bool = False) -> pd.DataFrame:
    """Errors of every method on the GPU, octave by octave, for the frequencies of Llama 3.

    Returns:
        The columns of `topics.precision.errors.errors`, and status (``"ok"`` or ``"failed: ..."``), and emulated: the
        share of the angles that have the bits of TF32 emulated on a CPU, for the methods that use TF32.

    Raises:
        Unavailable: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise Unavailable("tensor cores and fast maths are a GPU's")
    methods = {name: on_gpu(method) for name, method in METHODS.items()} | GPU_METHODS
    return held(methods, SMOKE_TOPS if smoke else TOPS, SAMPLES // 16 if smoke else SAMPLES)


def held(methods: Mapping[str, Method], tops: Sequence[int], samples: int) -> pd.DataFrame:
    """The table of `precision_study` for any methods."""
    frequencies = inverse_frequencies(ROTARY_DIM, BASE)
    rows = []
    for name, method in progress(methods.items(), lambda item: item[0]):
        for top in tops:
            positions = octave(top, samples)
            row = {"method": name, "position": top, "status": "ok"}
            try:
                row |= _row(method, positions, frequencies)
            except Exception as error:  # a method that cannot run is a result too
                row["status"] = timing.failure(error)
            rows.append(row)
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def _row(method: Method, positions: torch.Tensor, frequencies: torch.Tensor) -> dict[str, float]:
    waves = method.waves(positions, frequencies)
    angles = None if method.angles is None else precision.angle_error(method, positions, frequencies)
    row = compare(waves, exact_waves(positions, frequencies), method, positions, frequencies, angles)
    if method.bound == TF32_BOUND:
        ours = METHODS[EMULATED].angles(positions, frequencies)
        row["emulated"] = (method.angles(positions, frequencies).cpu() == ours).double().mean().item()
    return row


def on_gpu(method: Method) -> Method:
    """The same method with the cosine of the GPU."""

    def there(function):
        return function and (lambda positions, frequencies: function(positions.cuda(), frequencies.cuda()))

    return replace(method, waves=there(method.waves), angles=there(method.angles))


# --------------------------------------------------------------------------------------------------------------- TF32

# The library may round operands to nearest or cut them off. Cutting is off by twice as much, so its bound covers both.
# The product is exact if the operands have 11 digits. It is rounded once if the library does not use TF32 at all, as
# for the inner dimension 1 of an outer product (see the record).
TF32_BOUND = Bound((TF32 - 1,), (FP32, TF32 - 1), (FP32,), wave=wave_error(FP32, halves=4))


def _matrix_product(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The outer product as a product of a column and a row."""
    with _tf32():
        return positions.cuda().float()[:, None] @ frequencies.cuda().float()[None]


def _batched_product(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The outer product as in most models of transformers: a batch of matrices ``[F, 1] @ [1, P]``, transposed."""
    with _tf32():
        return (frequencies.cuda().float()[None, :, None] @ positions.cuda().float()[None, None])[0].T


def _padded_product(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The outer product as a sum of 16 terms, of which 15 are zero; tensor cores take this inner dimension."""
    columns = torch.zeros(len(positions), 16, device="cuda")
    rows = torch.zeros(16, len(frequencies), device="cuda")
    columns[:, 0], rows[0] = positions.cuda(), frequencies.cuda()
    with _tf32():
        return columns @ rows


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---------------------------------------------------------------------------------------------------------- fast maths

INVERSE_TURN = 0.15915493667125702
"""``1 / 2 pi`` in float32. The hardware first multiplies by this number (tests read it in the machine code)."""
_MUFU = wave_error(0, halves=2) * 2.0**-20.5
"""``sin.approx`` and ``cos.approx`` are off by ``2**-20.5`` at most between -2 pi and 2 pi (PTX ISA)."""


@triton.jit
def fast_sincos(angles, cos, sin, count, BLOCK: tl.constexpr):
    """The cosine and sine of the hardware: ``__cosf`` and ``__sinf``, or ``--use_fast_math``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(angles + at, mask=at < count)
    c = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    s = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(cos + at, c, mask=at < count)
    tl.store(sin + at, s, mask=at < count)


def _fast_waves(positions: torch.Tensor, frequencies: torch.Tensor) -> Waves:
    angles = METHODS["fp32 angles"].angles(positions.cuda(), frequencies.cuda()).contiguous()
    cos, sin = torch.empty_like(angles), torch.empty_like(angles)
    fast_sincos[(triton.cdiv(angles.numel(), 1024),)](angles, cos, sin, angles.numel(), BLOCK=1024)
    return cos, sin


def fast_reduction(angle: torch.Tensor) -> torch.Tensor:
    """The error of an angle (rad) that one product converts to turns; the product is truncated to 24 digits.

    The constant has a relative error, and the product has an error of less than a unit in the last place.
    """
    constant = abs(INVERSE_TURN * 2 * torch.pi - 1)
    turns = angle * INVERSE_TURN
    return angle * constant + 2 * torch.pi * 2.0 ** -(FP32 - 1) * precision.ufp(turns)


def fast_reduction_words() -> str:
    """The limits of `fast_reduction` up to a turn and up to 50 turns, in markdown."""
    near, far = fast_reduction(torch.tensor([2 * torch.pi - 1e-9, 100 * torch.pi], dtype=torch.float64)).log2().tolist()
    return f"$2^{{{near:.1f}}}$ up to $2\\pi$ and $2^{{{far:.1f}}}$ up to $100\\pi$."


GPU_METHODS: dict[str, Method] = {
    "TF32 matmul": from_angles(_matrix_product, TF32_BOUND),
    "TF32 batched matmul": from_angles(_batched_product, TF32_BOUND),
    "TF32 matmul, padded": from_angles(_padded_product, TF32_BOUND),
    "fast-math sincos": Method(_fast_waves, Bound((FP32,), (FP32,), (FP32,), reduction=fast_reduction, wave=_MUFU)),
}
"""Name -> method; the methods take CPU tensors."""

STUDIES = {"precision": Study(precision_study, gpu_gib=1, rows=23, timed=False)}
