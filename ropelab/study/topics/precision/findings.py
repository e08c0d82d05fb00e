"""Tabulate the error and the bound of each method of `topics.precision.methods`, and word the tables."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.model_config import rope_from_config
from ropelab.bench.exact_waves import exact_waves
from ropelab.bench.rows import is_right, need
from ropelab.conformance.bounds import rotate_exactly
from ropelab.layout.pairing import pairs
from ropelab.study.topics.precision import methods as precision
from ropelab.study.topics.precision.methods import METHODS, REFERENCE, Method, chord
from ropelab.study.topics.precision.models import MODELS, Model

OURS, TABLE_FREE, USUAL = "float64-built tables", "table-free kernel", "fp32 angles"
ON_GPU = ("TF32 matmul", "TF32 batched matmul", "TF32 matmul, padded", "fast-math sincos")
"""Methods of `ropelab.study.topics.precision.gpu`."""
TOPS = tuple(2**k for k in range(23))
"""The ends of the octaves of positions: 1, 2, 4, ..., 4,194,304."""
INT32 = 2**31
"""The limit of int32, which every position is below."""
SMOKE_TOPS = (1, 256, 2048, 2**17, 2**22)
SAMPLES = 2048
LOSSES = {"1 rad": 1.0, "half a turn": math.pi, "a full turn": 2 * math.pi}
BF16_ROUNDING = 2.0**-precision.BF16
"""The largest relative error of a rotated feature that is stored in bfloat16."""
FP32_ROUNDING = 2.0**-precision.FP32
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


def ulps(frequencies: torch.Tensor, top: int, samples: int = SAMPLES, head_dim: int = 64) -> pd.DataFrame:
    """Every error in units in the last place of the exact value: of computed waves, and of rotated features.

    Args:
        frequencies: float64 ``[F]``.
        top: the end of the octave of positions.
        samples: positions, and tokens of one head of normally distributed features that `ropelab.apply_rope` rotates.

    Returns:
        Columns of (a panel), what and ulps.
    """
    positions = octave(top, samples)
    truth = exact_waves(positions, frequencies)

    def waves(name: str) -> precision.Waves:
        return METHODS[name].waves(positions, frequencies)

    found = {
        ("cosine and sine, float32", name): torch.cat(
            [_in_ulps(x, right, torch.float32) for x, right in zip(waves(name), truth, strict=True)]
        )
        for name in (OURS, TABLE_FREE, USUAL)
    }
    cos, sin = ropelab.rotary_table(samples, head_dim)
    where = exact_waves(torch.arange(samples), inverse_frequencies(head_dim, 1e4))
    x = torch.randn(1, samples, 1, head_dim, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = x.to(dtype)
        y = pairs(ropelab.apply_rope(given, cos=cos, sin=sin)[0, :, 0], "split_half")
        right = rotate_exactly(*(half.double() for half in pairs(given[0, :, 0], "split_half")), *where)
        errors = [_in_ulps(got, exact, dtype) for got, exact in zip(y, right, strict=True)]
        found["features that apply_rope rotated", str(dtype).removeprefix("torch.")] = torch.cat(errors)
    return pd.concat(
        [pd.DataFrame({"of": of, "what": what, "ulps": x.flatten().numpy()}) for (of, what), x in found.items()],
        ignore_index=True,
    )


def _in_ulps(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Errors in units in the last place that the exact float64 values have in a dtype."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp(min=info.tiny))
    return (got.double() - exact).abs() / torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def ulps_by_position(found: pd.DataFrame) -> pd.DataFrame:
    """The largest error of float32 waves up to some positions, in ulps of the value itself, from `errors`."""
    table = found.pivot(index="method", columns="position", values="ulps").loc[[OURS, TABLE_FREE]].cummax(axis=1)
    return table[[top for top in table if top in (1, 2**8, 2**12, 2**17, 2**20, 2**22)]]


def ulps_sentence(found: pd.DataFrame) -> str:
    """The shares of waves and of rotated features within half a unit, then the largest errors."""
    waves, features = (
        ", ".join(f"{share:.1%} of {what}" for what, share in part.groupby("what", sort=False).near.mean().items())
        for _, part in found.assign(near=found.ulps <= 0.5).groupby("of", sort=False)
    )
    most = ", ".join(f"{what} {ulps:.3g}" for what, ulps in found.groupby("what", sort=False).ulps.max().items())
    return (
        f"Within half an ulp of the exact value are {waves}. Of the features that `apply_rope` rotated it is "
        f"{features}. The largest errors of these in ulps: {most}"
    )


def _fraction(error: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest ratio of an error to its bound; infinite for an error where the bound is 0."""
    return float(torch.where(error > 0, error / bound, 0.0).max())


def tightness(found: pd.DataFrame) -> pd.DataFrame:
    """For each method, the largest ratio of an error to its bound, and the ratio of the two curves at their ends."""
    last = found[found.position == found.position.max()].set_index("method")
    table = found.groupby("method", sort=False).fraction.max().to_frame("largest error / its bound")
    table["curve / curve of bounds, angle"] = last.angle_error / last.angle_bound
    table["curve / curve of bounds, output"] = last.output_error / last.output_bound
    return table


def losses(frequencies: torch.Tensor, longest: int = TOPS[-1], methods: Methods = METHODS) -> pd.DataFrame:
    """The first position at which an angle is off by 1 rad, half a turn or a full turn; words if there is none."""
    rows = {}
    for name, method in methods.items():
        row = {}
        for loss, radians in LOSSES.items():
            position = first_loss(method, frequencies, radians, longest)
            safe = safe_up_to(method, frequencies, radians)
            never = f"not up to {safe:,}" if safe < INT32 else "never"
            row[loss] = f"{position:,}" if position else never
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="method")


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


# ------------------------------------------------------------------------------------------------------- the reference


def reference_check(rotary_dim: int, base: float, longest: int = TOPS[-1], count: int = 64) -> pd.DataFrame:
    """The errors of some cosines and sines in float64 near ``longest``, against mpmath with 200 bits.

    Returns:
        Columns what, error (largest, absolute), bound, and share of half an ulp: the error over half a float32 ulp
        below 1 (2**-25).
    """
    import mpmath

    frequencies = inverse_frequencies(rotary_dim, base)
    draw = torch.Generator().manual_seed(0)
    positions = torch.randint(longest // 2, longest + 1, (count,), generator=draw)
    planes = torch.randint(0, len(frequencies), (count,), generator=draw)
    with mpmath.workprec(200):
        real = [mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / rotary_dim) for i in planes.tolist()]
        given = [mpmath.mpf(frequencies[i].item()) for i in planes.tolist()]

        def largest(waves: precision.Waves, turn: list) -> float:
            errors = []
            for row, (p, plane) in enumerate(zip(positions.tolist(), planes.tolist(), strict=True)):
                cos, sin = (mpmath.mpf(wave[row, plane].item()) for wave in waves)
                errors.append(mpmath.hypot(cos - mpmath.cos(p * turn[row]), sin - mpmath.sin(p * turn[row])))
            return float(max(errors))

        plain = precision.float64_tables(positions, frequencies, torch.float64)
        # Product and cosine round. The exponent e = 2i/R rounds too: the power multiplies its relative error by
        # ``e ln base``, and errs by 2 units itself.
        bound = 2.0**-53 * longest + precision.wave_error(precision.FP64, halves=4) + REFERENCE
        e = torch.arange(0, rotary_dim, 2).double() / rotary_dim
        frequency_bound = 2.0**-53 * float((longest * base**-e * (e * math.log(base) + 2)).max())
        checks = {
            "the reference, same frequencies": (largest(exact_waves(positions, frequencies), given), REFERENCE),
            "plain float64, same frequencies": (largest(plain, given), bound),
            "plain float64, frequencies that are real numbers": (largest(plain, real), bound + frequency_bound),
        }
    rows = [(what, error, bound, error / 2.0**-25) for what, (error, bound) in checks.items()]
    return pd.DataFrame(rows, columns=["what", "error", "bound", "share of half an ulp"])


# ----------------------------------------------------------------------------------------------------------- sentences


def reference_sentence(check: pd.DataFrame, longest: int) -> str:
    """The sentence on the table of `reference_check`: how far plain float64 is off."""
    return (
        f"Float64 is exact enough: at {longest:,} tokens its cosines are off by {check.error.iloc[-1]:.0e}, "
        f"{check['share of half an ulp'].iloc[-1]:.1%} of the error that rounding to float32 adds"
    )


def sentence(found: pd.DataFrame) -> str:
    """The sentence on the table of `errors` at the longest position."""
    last = found[found.position == found.position.max()].set_index("method")
    parts = [
        f"{_angle(last.angle_error[name])} with {name}" for name in ("bf16 positions", USUAL) if name in last.index
    ]
    text = f"At {last.position.iloc[0]:,} tokens the largest angle errors found are {', '.join(parts)}"
    if OURS in last.index:
        error = last.output_error[OURS]
        text += f". {OURS.capitalize()} keep the rotation to {error:.1e} ({_bits(error)} bits)"
    if TABLE_FREE in last.index:
        text += f", the {TABLE_FREE} to {last.output_error[TABLE_FREE]:.1e}"
    return text


def bounds_sentence(found: pd.DataFrame) -> str:
    """The sentence that says whether every error stays within its bound, and names the largest ratio."""
    table = tightness(found)
    largest = table["largest error / its bound"]
    curves = table.drop(columns="largest error / its bound")
    holds = "Every error stays within its bound" if (largest <= 1).all() else "A bound is broken"
    return (
        f"{holds}: the largest reach {largest.min():.2f} to {largest.max():.2f} of it, and at "
        f"{found.position.max():,} tokens the curves end at {curves.min(axis=None):.2f} to "
        f"{curves.max(axis=None):.2f} of those of the bounds"
    )


def losses_sentence(frequencies: torch.Tensor, longest: int = TOPS[-1], methods: Methods = METHODS) -> str:
    """The sentence that names the methods that lose a full turn, and the errors of the other methods."""
    found = {name: first_loss(method, frequencies, LOSSES["a full turn"], longest) for name, method in methods.items()}
    lost = [f"{name} at {position:,}" for name, position in found.items() if position]
    kept = [name for name, position in found.items() if not position]
    text = f"Angles lose a full turn: {', '.join(lost)}" if lost else "No angle loses a full turn"
    return text + (f"; none up to {longest:,}: {', '.join(kept)}" if kept else "")


def law_sentence(found: pd.DataFrame) -> str:
    """The sentence on the change of scores whose tokens keep their distance, at the largest distance."""
    distance = found.distance.max()
    worst = found[found.distance == distance].groupby("method", sort=False)[["moved", "off"]].max()
    names = [name for name in ("bf16 positions", USUAL, OURS) if name in worst.index]
    moved = ", ".join(f"{worst.moved[name]:.2g} with {name}" for name in names)
    text = (
        f"Noise moves some scores by {moved}. These are the largest changes found at distance {distance:,} and up to "
    )
    text += f"{found.position.max():,} tokens, of scores that are 1 at most"
    if "bf16 frequencies" in worst.index:
        one = worst.loc["bf16 frequencies"]
        first = found[(found.distance == distance) & (found.method == "bf16 frequencies")].off.iloc[0]
        text += (
            f". Frequencies in bf16 make such a score wrong by {first:.2g} from the first positions on. As the tokens "
            f"move, it changes by up to {one.moved:.2g}, because the product is rounded"
        )
    return text


def attention_sentence(found: pd.DataFrame) -> str:
    """The sentence on the share of the attention that goes to other keys at the longest position."""
    last = found[found.position == found.position.max()].set_index("method").weights_error
    names = [name for name in ("bf16 positions", "bf16 frequencies", USUAL, "bf16 tables", OURS) if name in last.index]
    others = ", ".join(f"{_share(last[name])} with {name}" for name in names[1:])
    return (
        f"At {found.position.max():,} tokens {_share(last[names[0]])} of a random query's attention goes to other keys "
        f"with {names[0]}. For the same queries and keys it is {others}"
    )


def models_sentence(found: pd.DataFrame) -> str:
    """The sentence on rotations with fewer right bits than bfloat16 at their longest context, usually and with ours."""
    bits = found.pivot(index="model", columns="method", values="bits")
    usual = bits[USUAL]
    fewer = int((usual < precision.BF16).sum())
    return (
        f"With {USUAL} {fewer} of {len(bits)} rotations of models have fewer right bits than bfloat16. At their "
        f"longest context the worst has {usual.min():.1f} ({usual.idxmin()}), where bfloat16 has {precision.BF16}. "
        f"{OURS.capitalize()} keep {bits[OURS].min():.1f}"
    )


def gpu_sentence(found: pd.DataFrame) -> str:
    """The sentence on the errors of TF32 and fast maths at the longest position, and on products without TF32."""
    ran = found[is_right(found) & found.method.isin([*ON_GPU, USUAL])]
    errors = ran.pivot(index="position", columns="method", values="angle_error")
    errors = errors[[name for name in (*ON_GPU, USUAL) if name in errors]]
    if set(errors) <= {USUAL}:
        return "Nothing that needs a GPU has run"
    need(errors, USUAL)
    usual = [name for name in errors if name != USUAL and (errors[name] == errors[USUAL]).all()]
    off = {name: f"{_angle(error)} with {name}" for name, error in errors.drop(columns=usual).iloc[-1].items()}
    plain = off.pop(USUAL)
    text = f"At {errors.index[-1]:,} tokens the largest angle errors found are {', '.join(off.values())}"
    text += f". It is {plain}"
    if usual:
        text += f". The errors of {' and '.join(usual)} are those of {USUAL}: no TF32 there"
    beyond = list(dict.fromkeys(ran.method[ran.fraction > 1]))
    return text + (f". Beyond the bound: {', '.join(beyond)}" if beyond else ". All are within their bounds")


def pairs_sentence(found: pd.DataFrame) -> str:
    """The sentence on the results of all pairs of bfloat16 numbers, from the record `all_pairs`."""
    count, right, neighbour, undecided, special = (
        int(found[name].sum()) for name in ("results", "right", "neighbour", "undecided", "special")
    )
    text = (
        f"At {len(found)} angles {right / count:.6%} of {count:,} finite results are the correctly rounded numbers. "
        f"{neighbour:,} are the number beside it, {undecided:,} are undecided, and {special:,} infinities or NaN are "
        f"other than in IEEE 754. The largest error is {found.fraction.max():.3f} of its bound"
    )
    other = count - right - neighbour - undecided
    most = f" by up to {found.worst_ulps.max():.1f} ulps, where two products almost cancel"
    return text + (f"; {other:,} results are off{most}" if other else "")


def emulation_sentence(found: pd.DataFrame) -> str:
    """The sentence on the octaves in which all angles of the tensor cores have the bits of the emulation."""
    counts = []
    for name, octaves in found.dropna(subset="emulated").groupby("method", sort=False):
        other = octaves.position[octaves.emulated < 1]
        few = f" (not up to {other.max():,})" if 0 < len(other) < len(octaves) else ""
        counts.append(f"{name} {len(octaves) - len(other)} of {len(octaves)}{few}")
    return f"Octaves in which all angles have the bits of the emulation: {', '.join(counts)}"


def _angle(radians: float) -> str:
    turns = radians / (2 * math.pi)
    return f"{turns:,.0f} turns" if turns >= 10 else f"{radians:.2g} rad"


def _bits(error: float) -> str:
    return f"{-math.log2(error):.1f}"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.095 else f"{value:.1%}" if value >= 0.0005 else f"{value:.0e}"
