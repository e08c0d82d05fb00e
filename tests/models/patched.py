"""Compare a model before and after `ropelab.interop.huggingface.patch`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ropelab.conformance.models.attention_laws import FLOAT32_UNIT
from ropelab.conformance.models.factory import TinyModel, first_tensor
from ropelab.interop.huggingface import patch

Run = Callable[[TinyModel], list[torch.Tensor]]
"""Runs a model, and returns what is compared."""


@dataclass(frozen=True)
class Compared:
    """How far apart a model's results are before and after the patch.

    Attributes:
        status: ``"equal"``, ``"differs"``, or why the comparison was not possible.
        difference, allowed: the largest difference relative to the largest element of a tensor, and the bound, for the
            tensor that comes closest to the bound. The bound is the rounding of two runs, times 2 for the samples. The
            difference between the results in float32 and in float64 measures the rounding. The bound is no less than
            one rounding to float32.
    """

    status: str
    difference: float = 0.0
    allowed: float = 0.0


def compare(tiny: TinyModel, *, qk_norm: bool = False) -> dict[str, Compared]:
    """Compare the results, the gradients, packed sequences and decoding with a cache.

    Args:
        tiny: the model, which is in float64 afterwards.
        qk_norm: as for `patch`.

    Raises:
        ValueError: `patch` refuses the model.
    """
    with patch(tiny.model, qk_norm=qk_norm):
        pass
    return {name: compare_runs(tiny, run, lambda: patch(tiny.model, qk_norm=qk_norm)) for name, run in _RUNS.items()}


def compare_compiled(tiny: TinyModel) -> Compared:
    """Compare the first result and the gradients, with the patched model through ``torch.compile``.

    The backend is ``"aot_eager"``: torch traces forward and backward, and generates no code from the traces.

    Args:
        tiny: the model, which is in float64 afterwards.

    Raises:
        ValueError: `patch` refuses the model.
    """
    with patch(tiny.model):
        pass

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with patch(tiny.model), _compiled(tiny):
            yield

    try:
        return compare_runs(tiny, forward_and_gradients, patched)
    except Exception:
        if reason := _not_compiled(tiny):
            return Compared(f"not offered: {reason}")
        raise


def compare_runs(
    tiny: TinyModel, run: Run, patched: Callable[[], contextlib.AbstractContextManager[object]]
) -> Compared:
    """Compare a run in float64 with the same run inside of ``patched()``."""
    tiny = tiny.double()
    try:
        wide = run(tiny)
    except Exception as error:  # the model does not do this
        return Compared(f"not offered: {type(error).__name__}")
    narrow = run(tiny.single())
    tiny = tiny.double()
    with patched():
        found = run(tiny)
    apart, allowed = max(map(_apart, wide, found, narrow), key=lambda pair: pair[0] / pair[1])
    return Compared("equal" if apart <= allowed else "differs", apart, allowed)


def forward_and_gradients(tiny: TinyModel) -> list[torch.Tensor]:
    """The first result, and the gradients of all weights for a random cotangent; a weight without one gets zeros."""
    tiny.model.zero_grad(set_to_none=True)
    y = tiny.output(**_no_cache(tiny))
    finite = torch.where(y.isfinite(), y, 0)
    generator = torch.Generator().manual_seed(3)
    finite.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in tiny.model.parameters()]
    tiny.model.zero_grad(set_to_none=True)
    return [finite.detach(), *grads]


def packed(tiny: TinyModel) -> list[torch.Tensor]:
    """The result for two sequences in one row."""
    tokens = tiny.inputs["input_ids"][:1]
    positions = torch.cat((torch.arange(tokens.shape[1] - 4), torch.arange(4)))[None]
    with torch.no_grad():
        return [tiny.output(input_ids=tokens, position_ids=positions, **_no_cache(tiny))]


def decoded(tiny: TinyModel) -> list[torch.Tensor]:
    """The results for the last tokens, one at a time after the cache of the tokens before."""
    tokens = tiny.inputs["input_ids"]
    results = []
    with torch.no_grad():
        returned = tiny.model(**(tiny.inputs | {"input_ids": tokens[:, :-2], "use_cache": True}))
        for place in range(tokens.shape[1] - 2, tokens.shape[1]):
            step = {"input_ids": tokens[:, place : place + 1], "past_key_values": returned.past_key_values}
            returned = tiny.model(**(tiny.inputs | step | {"use_cache": True}))
            results.append(first_tensor(returned))
    return results


_RUNS: dict[str, Run] = {"forward and gradients": forward_and_gradients, "packed": packed, "decoded": decoded}


def _no_cache(tiny: TinyModel) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(tiny.model.forward).parameters else {}


@contextlib.contextmanager
def _compiled(tiny: TinyModel) -> Iterator[None]:
    """Run the model's forward through ``torch.compile``."""
    original = tiny.model.forward
    torch._dynamo.reset()
    tiny.model.forward = torch.compile(original, backend="aot_eager", dynamic=False)
    try:
        yield
    finally:
        del tiny.model.forward


def _not_compiled(tiny: TinyModel) -> str:
    """The error of the model without the patch when ``torch.compile`` runs it; empty if it runs."""
    try:
        with _compiled(tiny):
            forward_and_gradients(tiny)
    except Exception as error:
        return type(error).__name__
    return ""


def _apart(wide: torch.Tensor, found: torch.Tensor, narrow: torch.Tensor) -> tuple[float, float]:
    """The largest difference between two tensors, and the bound, both relative to the largest element."""
    finite = wide.isfinite() & found.isfinite() & narrow.isfinite()
    wide, found, narrow = (x.double()[finite] for x in (wide, found, narrow))
    if not wide.numel() or not (scale := float(wide.abs().max())):
        return 0.0, 1.0
    noise = float((wide - narrow).abs().max()) / scale + FLOAT32_UNIT
    return float((wide - found).abs().max()) / scale, 4 * noise
