"""Word the findings of the chapters on the rotation and on its gradients, and make their tables."""

import pandas as pd
from pandas.io.formats.style import Styler

from ropelab.bench.records import Unusable, load
from ropelab.study.topics.gradients import bound_evidence, wrong_backward


def roundings() -> str:
    """The unit roundoffs of each dtype on this machine, as a table in markdown."""
    rows = ["| q, k | table $t$ | arithmetic $u$ | store $u_{out}$ |", "|---|---|---|---|"]
    for dtype in bound_evidence.DTYPES:
        maths = bound_evidence.arithmetic(dtype)
        units = [_power(rounding.unit) for rounding in (maths.table, maths.compute, maths.store)]
        rows.append(f"| {bound_evidence.short_name(dtype)} | {' | '.join(units)} |")
    return "\n".join(rows)


def _power(unit: float) -> str:
    """A power of two in LaTeX."""
    return f"$2^{{{float(unit).hex().partition('p')[2]}}}$" if unit else "0"


def worst(evidence: pd.DataFrame) -> pd.DataFrame:
    """The largest error over its bound, for each law and dtype."""
    return evidence.pivot_table(index="law", columns="dtype", values="fraction", aggfunc="max", sort=False)


def rotation_sentence(evidence: pd.DataFrame, faults: pd.DataFrame) -> str:
    """How near the rotation comes to its bound, and how far beyond it the mildest fault is."""
    rotation = evidence[evidence.law == "definition"]
    narrow = rotation.dtype.isin(["bfloat16", "float16"])
    return (
        f"`apply_rope` ({bound_evidence.backend()}) agrees with the definition within a derived rounding bound, in "
        f"{rotation.dtype.nunique()} dtypes and both layouts. In 16 bits, where the store dominates, the largest error "
        f"is {rotation[narrow].fraction.max():.1%} of the bound; in 32 and 64 bits it is "
        f"{rotation[~narrow].fraction.max():.0%}. The mildest of {faults.fault.nunique()} known faults reaches "
        f"{faults.fraction.min():.0f} times the bound."
    )


def layouts_sentence(evidence: pd.DataFrame) -> str:
    """Whether the two layouts give the same bits."""
    same = (evidence[evidence.law == "layouts agree"].fraction == 0).all()
    return f"The two layouts give {'the same bits' if same else 'results within twice the bound'} after permutation."


def gradient_sentence(evidence: pd.DataFrame, checks: pd.DataFrame) -> str:
    """How near the gradient comes to its bound, and the numerical checks that pass."""
    return (
        f"The gradient of `apply_rope` ({bound_evidence.backend()}) is $R(-\\theta)\\,g$ within the derived rounding "
        f"bound in {evidence.dtype.nunique()} dtypes. The largest error is {evidence.fraction.max():.1%} of the bound. "
        f"{checks.passes.sum()} of {len(checks)} numerical checks of first and second order pass."
    )


def latent_sentence(latent: pd.DataFrame, faults: pd.DataFrame) -> str:
    """How near key, value and gradients of latent attention come to their bounds."""
    return (
        f"Key, value and gradients of `assemble_mla_kv` are right within the derived bound in "
        f"{latent.dtype.nunique()} dtypes (the largest error is {latent.fraction.max():.1%} of the bound). Features "
        f"that do not rotate keep their bits. The bound rejects {(faults.fraction > 1).sum()} of {len(faults)} wrong "
        "gradients of $k_{pe}$."
    )


def wrong_code(wrong: str, missing: list[str]) -> str:
    """Which code repeats the forward here, and why another one does not run."""
    own = wrong != wrong_backward.MUTANT
    code = f"{wrong}'s own kernel" if own else "our copy of the fault, around `apply_rope`"
    return " ".join([f"The wrong backward in this section is {code}.", *(f"Not run: {line}." for line in missing)])


def wrong_sentence(wrong: str, errors: pd.DataFrame, overall: pd.DataFrame) -> str:
    """How the error of a backward that repeats the forward follows its closed form.

    Raises:
        AssertionError: it does not.
    """
    faulty = overall[overall.implementation == wrong].set_index("seq_len")
    follows = ((errors.error - errors.closed_form).abs() <= errors.bound).all()
    assert follows and (faulty.error - faulty.expected_error).abs().max() < 1e-6, "the error has another form"
    at = ", ".join(f"{row.error:.3f} at S = {seq_len}" for seq_len, row in faulty.iterrows())
    return (
        f"A backward that repeats the forward ({wrong}): its gradient is wrong by $2\\,|\\sin\\theta|$ per pair. The "
        f"measured errors agree with this formula within rounding at all {len(errors)} positions and planes. The "
        f"relative error of the whole gradient is {at}, while its norm is right to "
        f"{abs(faulty.norm_ratio - 1).max():.0e}."
    )


def recorded_sentence() -> str:
    """The errors of torchembed 0.3.0 on a GPU, from the record, or why there is none."""
    try:
        frame = load("deepspeed_correctness").frame
    except Unusable as error:
        return f"*No record: {error}.*"
    faulty = frame[(frame.version == "0.3.0") & frame.seq_len.isin((8, 128)) & (frame.dtype == "float32")]
    said = ", ".join(f"{row.gradient_error:.2f} at S = {row.seq_len}" for row in faulty.itertuples())
    return (
        f"Recorded on a GPU, torchembed 0.3.0 in float32: the gradient is off by {said} of its length, and the forward "
        f"by at most {faulty.forward_error.max():.0e}."
    )


def blind_sentence(outcomes: pd.DataFrame, wrong: str) -> str:
    """How many checks pass with the wrong backward, with one token and with several."""
    passes = outcomes[wrong]
    one, several = (passes[passes.index.str.endswith("S = 1") == single] for single in (True, False))
    return (
        f"{passes.sum()} of {len(passes)} usual checks pass with the wrong backward of {wrong}: {one.sum()} of "
        f"{len(one)} with one token, and {several.sum()} of {len(several)} with several."
    )


def passing(outcomes: pd.DataFrame, *names: str) -> Styler:
    """The outcomes of these implementations in words, with the failures in bold letters."""
    words = outcomes[list(names)].replace({True: "passes", False: "fails"})
    return words.style.map(lambda said: "font-weight: bold" * (said == "fails"))
