"""Tabulate the error and the bound of each method of `topics.precision.methods`."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from ropelab.angles.model_config import rope_from_config
from ropelab.bench.exact_waves import exact_waves
from ropelab.study.topics.precision import methods as precision
from ropelab.study.topics.precision.methods import METHODS, REFERENCE, Method, chord
from ropelab.study.topics.precision.models import MODELS, Model

OURS, TABLE_FREE, USUAL = "float64-built tables", "table-free kernel", "fp32 angles"
TOPS = tuple(2**k for k in range(23))
"""The ends of the octaves of positions: 1, 2, 4, ..., 4,194,304."""
INT32 = 2**31
"""The limit of int32, which every position is below."""
SMOKE_TOPS = (1, 256, 2048, 2**17, 2**22)
SAMPLES = 2048
_CHUNK = 2**14

Methods = Mapping[str, Method]


def octave(top: int, samples: int) -> torch.Tensor:
    """Positions from beyond ``top/2`` up to ``top``, in order: all, or a random choice and positions of roundings.

    Rounding to ``t`` digits turns from down to up half-way between two numbers of ``t`` digits. The integer
    ``top/2 + top/2**(t+1)`` is half-way between two of these numbers. The positions of roundings are these integers
    and the integers beside them.
    """
    first = top // 2 + 1
    if top - first < samples:
        return torch.arange(first, top + 1)
    chosen = torch.randint(first, top + 1, (samples,), generator=torch.Generator().manual_seed(top))
    steps = 2 ** torch.arange(top.bit_length() - 1)
    edges = torch.cat([top // 2 + steps, top - steps])
    return torch.cat([chosen, edges - 1, edges, edges + 1, torch.tensor([top])]).clamp(first, top).unique()


# ------------------------------------------------------------------------------------------ angles and rotated pairs


def errors(
    frequencies: torch.Tensor, tops: Sequence[int] = TOPS, samples: int = SAMPLES, methods: Methods = METHODS
) -> pd.DataFrame:
    """The largest errors in each octave of positions, over all planes, and the largest that the bounds allow there.

    Args:
        frequencies: float64 ``[F]``.

    Returns:
        A table with these columns:

        - method, position (the octave's end)
        - angle_error, angle_bound: errors of angles (rad)
        - output_error, output_bound: relative errors of a rotated pair
        - fraction: the largest ratio of an error to its bound, over both kinds and all elements; at most 1
        - ulps: the largest error in float32 ulps of the cosine's or sine's own value
    """
    rows = []
    for top in tops:
        positions = octave(top, samples)
        truth = exact_waves(positions, frequencies)
        for name, method in methods.items():
            waves = method.waves(positions, frequencies)
            angles = None if method.angles is None else precision.angle_error(method, positions, frequencies)
            row = compare(waves, truth, method, positions, frequencies, angles)
            rows.append({"method": name, "position": top, **row})
    return pd.DataFrame(rows)


def compare(
    waves: precision.Waves,
    truth: precision.Waves,
    method: Method,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    angles: torch.Tensor | None = None,
) -> dict[str, float]:
    """One row of `errors` without the method and the position.

    Args:
        angles: the errors of the angles, if the method has angles. Else the errors follow from (cos, sin): if a vector
            of length 1 has an error e < 1, its direction is off by at most the arc sine of e.
    """
    output, bound = precision.output_error(waves, truth), method.bound.output(positions, frequencies)
    if angles is None:
        angles, angle_bound = precision.turned(waves, truth), torch.asin(bound.clamp(max=1))
        angle_bound = torch.where(bound < 1, angle_bound, math.pi)
    else:
        angle_bound = method.bound.angle(positions, frequencies)
    return {
        "angle_error": float(angles.max()),
        "angle_bound": float(angle_bound.max()),
        "output_error": float(output.max()),
        "output_bound": float(bound.max()),
        "fraction": max(_fraction(angles, angle_bound), _fraction(output, bound)),
        "ulps": precision.worst_ulps(waves, truth),
    }


def _fraction(error: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest ratio of an error to its bound; infinite for an error where the bound is 0."""
    return float(torch.where(error > 0, error / bound, 0.0).max())


def first_loss(method: Method, frequencies: torch.Tensor, radians: float, longest: int = TOPS[-1]) -> int | None:
    """The first position up to ``longest`` at which the angle of some plane is off by ``radians`` or more.

    The function tries every position of the octaves in which the bound allows such an error.
    """
    if method.angles is None:
        return None
    first = 1
    while first <= longest:
        end = min(2 * first - 1, longest)
        if float(method.bound.angle(torch.tensor([end]), frequencies).max()) >= radians:
            for start in range(first, end + 1, _CHUNK):
                positions = torch.arange(start, min(start + _CHUNK, end + 1))
                lost = (precision.angle_error(method, positions, frequencies) >= radians).any(dim=1)
                if lost.any():
                    return int(positions[lost][0])
        first = end + 1
    return None


def safe_up_to(method: Method, frequencies: torch.Tensor, radians: float) -> int:
    """The largest power of two, `INT32` at most, up to which the bound excludes ``radians``; 0 if none."""
    top = 0
    for k in range(32):
        if float(method.bound.angle(torch.tensor([2**k - 1, 2**k]), frequencies).max()) >= radians:
            break
        top = 2**k
    return top


def law(
    frequencies: torch.Tensor,
    distances: Sequence[int] = (1, 500),
    tops: Sequence[int] = TOPS,
    samples: int = SAMPLES // 8,
    methods: Methods = METHODS,
) -> pd.DataFrame:
    """The change of ``<R_{t+d} q, R_t k>`` as t grows. The exact score depends on d alone.

    With the pair i of q and k as complex numbers the score is the real part of ``sum_i conj(q_i) k_i w_i``, where
    ``w_i = conj(e^{i (t+d) f_i}) e^{i t f_i}``. Over all q and k whose pairs have given lengths the error of the score
    is at most ``sum_i |q_i| |k_i| |w'_i - w_i|``, and some q and k attain this error. Errors here are in units of
    ``sum_i |q_i| |k_i|`` with pairs of equal lengths: the mean of ``|w'_i - w_i|``.

    Args:
        distances: the values of d. Two tokens at a distance of a power of two share the last digits of their products,
            so their roundings often cancel, and the change is smaller than at other distances.

    Returns:
        Columns method, distance, position (the end of the octave of t), moved (the distance from the method's own score
        at t = 0, which the law says is 0), moved_bound, off (the distance from the right score), off_bound.
    """
    rows = []
    for distance in distances:
        near, origin = torch.tensor([distance]), torch.tensor([0])
        right = _as_complex(exact_waves(near, frequencies))
        for name, method in methods.items():
            noise, wave = method.bound.noise, 2 * method.bound.wave + method.bound.wave**2
            own = _relative(method, near, origin, frequencies)
            at_start = noise(near, frequencies) + noise(origin, frequencies)
            for top in tops:
                positions = octave(top, samples)
                score = _relative(method, positions + distance, positions, frequencies)
                here = noise(positions + distance, frequencies) + noise(positions, frequencies)
                drift = distance * method.bound.drift(frequencies)
                row = {
                    "moved": (score - own).abs(),
                    "moved_bound": chord(here + at_start) + 2 * wave + REFERENCE,
                    "off": (score - right).abs(),
                    "off_bound": chord(here + drift) + wave + REFERENCE,
                }
                values = {column: float(value.mean(dim=1).max()) for column, value in row.items()}
                rows.append({"method": name, "distance": distance, "position": top, **values})
    return pd.DataFrame(rows)


def _relative(method: Method, queries: torch.Tensor, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """``w`` of `law`, conjugated, for a query at one position and a key at the other position, ``[P, F]``."""
    q, k = (_as_complex(method.waves(positions, frequencies)) for positions in (queries, keys))
    return q * k.conj()


def _as_complex(waves: precision.Waves) -> torch.Tensor:
    return torch.complex(*(wave.double().cpu() for wave in waves))


# ------------------------------------------------------------------------------------------------------------ attention


def attention(
    frequencies: torch.Tensor,
    tops: Sequence[int] = TOPS,
    *,
    window: int = 256,
    queries: int = 8,
    methods: Methods = METHODS,
) -> pd.DataFrame:
    """The errors of the scores of random queries and the keys before them, and of the attention weights.

    Only cos and sin have errors, because all other arithmetic is in float64. q and k are standard normal, and scores
    are divided by the root of the number of rotated features.

    Returns:
        A table with these columns:

        - method, position (the end of the octave of the queries)
        - score_error, score_bound: the largest errors of a score
        - weights_error, weights_bound: the largest share of the attention that goes to other keys, which is half the
          sum of ``|p' - p|``; if no score is off by more than e, the share is at most ``tanh(e/2)``
    """
    rows = []
    generator = torch.Generator().manual_seed(0)
    shape, options = (window, len(frequencies)), {"generator": generator, "dtype": torch.complex128}
    root = math.sqrt(2 * len(frequencies))
    k = math.sqrt(2) * torch.randn(shape, **options)
    q = math.sqrt(2) * torch.randn(len(frequencies), **options)
    for top in tops:
        found = {name: [] for name in methods}
        for position in octave(top, queries).tolist():
            keys = torch.arange(max(0, position - window + 1), position + 1)
            query = torch.tensor([position])
            pairs = q * k[: len(keys)].conj() / root
            right = (pairs * _phase(exact_waves, query, keys, frequencies)).real.sum(dim=1)
            for name, method in methods.items():
                score = (pairs * _phase(method.waves, query, keys, frequencies)).real.sum(dim=1)
                noise = method.bound.noise(query, frequencies) + method.bound.noise(keys, frequencies)
                drift = (position - keys)[:, None] * method.bound.drift(frequencies)
                wave = 2 * method.bound.wave + method.bound.wave**2 + REFERENCE
                bound = (pairs.abs() * (chord(noise + drift) + wave)).sum(dim=1).max()
                moved = (score.softmax(0) - right.softmax(0)).abs().sum() / 2
                found[name].append(((score - right).abs().max(), bound, moved, torch.tanh(bound / 2)))
        for name, values in found.items():
            largest = torch.tensor(values).amax(dim=0).tolist()
            columns = ("score_error", "score_bound", "weights_error", "weights_bound")
            rows.append({"method": name, "position": top, **dict(zip(columns, largest, strict=True))})
    return pd.DataFrame(rows)


def _phase(waves: precision.Function, query: torch.Tensor, keys: torch.Tensor, frequencies: torch.Tensor):
    return _as_complex(waves(query, frequencies)) * _as_complex(waves(keys, frequencies)).conj()


# --------------------------------------------------------------------------------------------------------- real models


def models(chosen: Mapping[str, Model] = MODELS, samples: int = SAMPLES, methods: Methods = METHODS) -> pd.DataFrame:
    """The errors of models near their longest context; `rope_from_config` reads the configurations.

    Returns:
        Columns model, length, planes (the number of planes that turn), method, output_error (the largest error of a
        rotated pair), output_bound, bits (the number of right bits: ``-log2`` of the error, at least 0).
    """
    rows = []
    for name, model in chosen.items():
        rope = rope_from_config(model.config, layer_type=model.layer_type)
        rope = rope.at_length(rope.max_seq_len)
        frequencies = rope.inverse_frequencies[rope.inverse_frequencies > 0]
        last = rope.max_seq_len - 1
        positions = torch.arange(max(1, last - samples + 1), last + 1)
        truth = exact_waves(positions, frequencies)
        for label, method in methods.items():
            error = precision.output_error(method.waves(positions, frequencies), truth)
            rows.append(
                {
                    "model": name,
                    "length": rope.max_seq_len,
                    "planes": len(frequencies),
                    "method": label,
                    "output_error": float(error.max()),
                    "output_bound": float(method.bound.output(positions, frequencies).max()),
                    "bits": max(0.0, -math.log2(float(error.max()))),
                }
            )
    return pd.DataFrame(rows)


def in_words(radians: float) -> str:
    """An error of an angle, in turns from ten turns on."""
    turns = radians / (2 * math.pi)
    return f"{turns:,.0f} turns" if turns >= 10 else f"{radians:.2g} rad"
