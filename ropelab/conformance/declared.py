"""Turn the claims about a function into a declaration, and reject claims that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

import torch

from ropelab.arguments import choice, flag, integers
from ropelab.command.vocabulary import CHOICES, FAMILIES, MOST_TOKENS
from ropelab.conformance.cache import CACHE_CONVENTIONS, CACHE_LAWS, CacheSubject
from ropelab.conformance.case import Sizes
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.jax_arrays import of_jax
from ropelab.conformance.law import Law
from ropelab.conformance.laws import LAWS
from ropelab.conformance.numpy_arrays import of_numpy, without_gradients
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.layout.pairing import LAYOUTS

DTYPES = {name: getattr(torch, name) for name in CHOICES["dtype"]}
MOST_FEATURES = 2**18
"""The largest number of features in all heads of a token: larger cases do not fit into a small machine's memory."""


@dataclass(frozen=True)
class Declaration:
    """The claims about a function, free of contradictions; made by `declare`.

    Attributes:
        convention: how the function is called, a name of ``CONVENTIONS`` or ``CACHE_CONVENTIONS``.
        laws: the laws that the function is checked against.
        sizes: the extents of most cases; cases of some laws have fewer heads.
        about: the claims for the report, name by name.
        claims: the claims as fields of `Subject`.
        kept: the first contents of the subject's ``state``.
        strict: whether the author declared the arithmetic, so that any other rounding breaks a law.
        arrays: whose arrays the function takes, ``"torch"``, ``"jax"`` or ``"numpy"``.
    """

    convention: str
    laws: tuple[Law, ...]
    sizes: Sizes
    about: dict[str, Any]
    claims: dict[str, Any]
    kept: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    arrays: str = "torch"

    @property
    def writes_cache(self) -> bool:
        """Whether the function is an operator that writes a paged cache; otherwise it is a rotation alone."""
        return self.convention in CACHE_CONVENTIONS

    def subject(self, function: Callable[..., Any], surroundings: Surroundings) -> Any:
        """Return ``function`` with its claims, and without any state of earlier calls: `Subject` or `CacheSubject`.

        Args:
            function: the function under test.
            surroundings: the global state, recorded before the import of the function if possible.
        """
        function = {"jax": of_jax, "numpy": of_numpy}.get(self.arrays, lambda f: f)(function)
        claims = self.claims | {"state": dict(self.kept), "surroundings": surroundings}
        if self.writes_cache:
            return CacheSubject(function, CACHE_CONVENTIONS[self.convention], **claims)
        kind = CONVENTIONS[self.convention]
        return Subject(function, without_gradients(kind) if self.arrays == "numpy" else kind, **claims)


def declare(
    convention: str,
    *,
    layout: str | None = None,
    laws: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    out_layout: str | None = None,
    seq_format: str | None = None,
    sign: str = "standard",
    maths: str | None = None,
    columns: str | None = None,
    inplace: bool = False,
    once_differentiable: bool = False,
    norm_last: bool = False,
    norm_across: bool = False,
    table_free: bool = False,
    rotary_dim: int | None = None,
    head_dim: int = 16,
    q_heads: int = 4,
    k_heads: int = 2,
    base: float = 10000.0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    token_counts: Sequence[int] = Sizes.token_counts,
    arrays: str = "torch",
) -> Declaration:
    """Return the declaration of a function. It needs neither the function nor the device.

    Args:
        convention: how the function is called, a name of ``CONVENTIONS``, or of ``CACHE_CONVENTIONS`` for an operator
            that writes a paged cache.
        layout: ``"split_half"`` or ``"interleaved"``; by default the first layout of the convention.
        laws: the names of the laws that the function is checked against; by default all laws that are not opt-in.
        skip: the names of laws to leave out.
        out_layout: the layout of the result, by default ``layout``.
        seq_format: the order of the axes, where the convention leaves a choice.
        sign: ``"reversed"`` for a function that is declared to rotate by minus the angle, else ``"standard"``.
        maths: ``"narrow"`` if tables and all operations are rounded to the dtype of the inputs, ``"wide"`` if they are
            in float32 or wider; by default the usual choice in the convention, and other roundings are a note.
        columns: the layout of full-width tables if it is not ``layout``. (GLM has ``"split_half"`` tables for adjacent
            pairs.) ``"pair"`` means tables with one column for each pair, ``"repeated"`` that by contract the two
            columns of a pair are equal, so that the function may read either.
        inplace: whether the result overwrites the inputs, where the convention does not prescribe it.
        once_differentiable: whether the function claims no second derivatives.
        norm_last: whether the norm of an operator that writes a cache comes after the rotation (Hunyuan).
        norm_across: whether all heads of q, and all heads of k, of a token share a norm (Wan).
        table_free: whether the caller passes frequencies in place of tables.
        rotary_dim: the number of features that rotate. By default it is ``head_dim``, or 3/4 of ``head_dim`` where the
            convention says that the width of the tables decides.
        head_dim, q_heads, k_heads: the sizes of most cases, for functions that do not take all sizes.
        base: the base of the frequencies, at least 1. Modules and plain functions get it as ``base=`` unless it is
            10000.
        device: the device of all tensors.
        dtype: the dtype of the tensors of most laws. Laws about dtypes use other dtypes as well.
        token_counts: numbers of tokens beyond which the function may take another path, such as the thresholds of a
            dispatch. The law ``token_counts`` compares some tokens of a call with one token more.
        arrays: ``"jax"`` or ``"numpy"`` for a function that gets and returns arrays of JAX or of NumPy. A function of
            NumPy has no gradients.

    Raises:
        TypeError: a size or ``base`` is not a number, a flag is not a bool, a choice is not a string, or ``dtype`` is
            not in ``DTYPES``.
        ValueError: an argument is out of its range or not one of its choices, or no law is left.
    """
    every: dict[str, Any] = {**CONVENTIONS, **CACHE_CONVENTIONS}
    kind = every[choice("convention", convention, every)]
    chosen = select(laws, skip, laws_of(convention))
    layout = choice("layout", kind.layouts[0] if layout is None else layout, LAYOUTS)
    out_layout = choice("out_layout", out_layout or getattr(kind, "out_layout", None) or layout, LAYOUTS)
    seq_format = choice("seq_format", seq_format or kind.seq_formats[0], kind.seq_formats)
    narrow = kind.narrow if maths is None else choice("maths", maths, CHOICES["maths"]) == "narrow"
    if convention in CACHE_CONVENTIONS:
        choice("layout", layout, kind.layouts)
        if out_layout != layout:
            raise ValueError(
                f"out_layout: expected {layout} for {convention}, which cannot express it, got {out_layout!r}"
            )
    if columns is not None and not getattr(kind, "columns", ()):
        raise ValueError(f"columns: expected None for {convention}, which cannot express it, got {columns!r}")
    if inplace and kind.in_place is False:
        raise ValueError(f"inplace: expected False for {convention}, which cannot express it, got {inplace}")
    variants = {"norm_last": norm_last, "norm_across": norm_across, "table_free": table_free}
    flags = {"inplace": inplace, "once_differentiable": once_differentiable} | variants
    for name, value in flags.items():
        flag(name, value)
    for name, value in variants.items():
        if value and not (convention in CACHE_CONVENTIONS and name in kind.variants):
            raise ValueError(f"{name}: expected False for {convention}, which cannot express it, got {value}")
    sizes = _sizes(q_heads, k_heads, head_dim, rotary_dim, kind.partial)
    sizes = replace(sizes, token_counts=integers("token_counts", token_counts, 1, MOST_TOKENS))
    _check_base(base)
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype: expected one of {tuple(DTYPES)}, got {dtype}")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as reason:
        raise ValueError(f"device: expected the name of a device of torch, got {device!r} ({_line(reason)})") from None
    if place.type == "cpu" and place.index:
        raise ValueError(f"device: expected cpu, as torch counts one CPU only, got {device!r}")
    device = str(place)
    in_place = bool(kind.in_place or inplace)
    claims = {"layout": layout, "out_layout": out_layout, "seq_format": seq_format,
              "reversed": choice("sign", sign, CHOICES["sign"]) == "reversed", "in_place": in_place, "narrow": narrow,
              "once": once_differentiable, "base": base, "device": device, "dtype": dtype}  # fmt: skip
    about = {"convention": convention, "layout": layout, "out_layout": out_layout, "seq_format": seq_format,
             "sign": sign, "maths": "narrow" if narrow else "wide", "inplace": in_place,
             "rotary_dim": sizes.rotary_dim, "head_dim": head_dim, "device": device, "dtype": dtype}  # fmt: skip
    if convention in CACHE_CONVENTIONS:
        claims, about = claims | variants, about | variants
    kept = {} if columns is None else {"columns": choice("columns", columns, kind.columns)}
    return Declaration(
        convention, chosen, sizes, about, claims, kept, maths is not None, _arrays(arrays, kind.in_place)
    )


def example(convention: str) -> str:
    """Return a call of a convention in words: dtype and shape of each tensor that the function gets, and other values.

    It has 15 tokens, as 3 sequences of 5 where a convention has sequences, 4 heads of q, 2 heads of k and 16 features.
    """
    dtypes = CACHE_CONVENTIONS[convention].dtypes if convention in CACHE_CONVENTIONS else (torch.float32,)
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    declaration = declare(convention, dtype=dtype)
    subject: Any = declaration.subject(lambda *arguments, **options: None, Surroundings(()))
    case = subject.draw(declaration.sizes)
    if declaration.writes_cache:
        return str(subject.convention.translate(subject, case, case.memory))
    return str(subject.arguments(case))


def laws_of(convention: str) -> Mapping[str, Law]:
    """Return the laws of a convention: `LAWS` of a rotation, `CACHE_LAWS` of an operator that writes a cache."""
    return CACHE_LAWS if convention in CACHE_CONVENTIONS else LAWS


def select(
    laws: Iterable[str] | None = None, skip: Iterable[str] = (), known: Mapping[str, Law] = LAWS
) -> tuple[Law, ...]:
    """Return laws in the order of ``known``.

    Args:
        laws: the names of laws or families; by default all laws that are not opt-in.
        skip: the names of laws or families to leave out.
        known: the laws of the convention.

    Raises:
        ValueError: a name is unknown, or no law is left.
    """

    def meant(names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            found |= known.keys() & FAMILIES[name].split() if name in FAMILIES else {choice("law", name, known)}
        return found

    named, skipped = None if laws is None else meant(laws), meant(skip)
    kept = (law for law in known.values() if law.name not in skipped)
    chosen = tuple(law for law in kept if (law.by_default if named is None else law.name in named))
    if not chosen:
        raise ValueError("laws: expected at least one law that is not skipped, got none")
    return chosen


def check_device(device: str) -> None:
    """Raise ValueError unless a small computation on ``device`` succeeds."""
    try:
        two = (torch.ones(1, device=device) + 1).item()
    except (AssertionError, ImportError, RuntimeError) as reason:  # NotImplementedError is a RuntimeError
        raise ValueError(f"device: expected a device that works here, got {device!r} ({_line(reason)})") from None
    if two != 2:
        raise ValueError(f"device: expected a device that works here, got {device!r}, where 1 + 1 = {two}")


def _sizes(q_heads: int, k_heads: int, head_dim: int, rotary_dim: int | None, partial: bool) -> Sizes:
    least = {"q_heads": (q_heads, 1), "k_heads": (k_heads, 1), "head_dim": (head_dim, 2)}
    if rotary_dim is not None:
        least["rotary_dim"] = (rotary_dim, 2)
    for name, (size, minimum) in least.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name}: expected an integer, got {size!r}")
        if size < minimum:
            raise ValueError(f"{name}: expected an integer of at least {minimum}, got {size}")
    if max(q_heads, k_heads) * head_dim > MOST_FEATURES:
        got = f"{max(q_heads, k_heads)} heads of {head_dim}"
        raise ValueError(f"head_dim: expected at most {MOST_FEATURES} features in all heads, got {got}")
    if rotary_dim is None:
        rotary_dim = head_dim // 8 * 6 if partial and head_dim >= 8 else head_dim
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim: expected an even number from 2 to head_dim = {head_dim}, got {rotary_dim}")
    return Sizes(q_heads=int(q_heads), k_heads=int(k_heads), head_dim=int(head_dim), rotary_dim=int(rotary_dim))


def _arrays(arrays: str, in_place: bool | None) -> str:
    if choice("arrays", arrays, CHOICES["arrays"]) == "jax":
        if in_place:
            raise ValueError(
                "arrays: expected torch for a convention in place, because arrays of JAX are immutable, got jax"
            )
        if find_spec("jax") is None:
            raise ValueError("arrays: expected an installed package, got jax, which is not installed")
    return arrays


def _check_base(base: float) -> None:
    if isinstance(base, bool) or not isinstance(base, Real):
        raise TypeError(f"base: expected a number, got {base!r}")
    # A base below 1 gives frequencies above 1 rad per token. Rounding may then erase an angle, and any result passes.
    if not (math.isfinite(base) and base >= 1):
        raise ValueError(f"base: expected a finite number of at least 1, got {base}")


def _line(reason: Exception) -> str:
    """Return the first line of torch's message, without the stack that may follow."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0]
