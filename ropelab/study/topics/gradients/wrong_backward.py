"""The fault of torchembed 0.3.0, a backward that rotates forward, as a mutant and in closed form.

The forward is y = R(a) x, so the gradient is R(-a) g. The faulty backward calls the forward kernel again and
returns R(a) g. On one plane R(a) - R(-a) = 2 sin(a) J with J a quarter turn, hence

    |R(a) g - R(-a) g| = 2 |sin a| |g|    and    |R(a) g| = |R(-a) g| = |g|.

The error is as large as possible where sin(a) is large, and the length is right everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import packages
from ropelab.conformance.bounds import exact, rotation_bound
from ropelab.kernels import INTERPRETED
from ropelab.study.topics.gradients import bound_evidence

# rotate(x [B, H, S, R], cos [S, R/2], sin [S, R/2]) -> [B, H, S, R], split-half: torchembed's convention.
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MUTANT = "mutant"
WRONG_PACKAGE = "torchembed 0.3.0"
RIGHT = ("ropelab", "torchembed 0.3.2")
VERSIONS = ("0.3.0", "0.3.2")


class _ForwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, rotate):
        ctx.save_for_backward(cos, sin)
        ctx.rotate = rotate
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rotate(grad, *ctx.saved_tensors), None, None, None


def with_wrong_backward(rotate: Rotate) -> Rotate:
    """The same rotation with a backward that applies the forward instead of the transpose."""
    return lambda x, cos, sin: _ForwardInBackward.apply(x, cos, sin, rotate)


def implementations() -> tuple[dict[str, Rotate], list[str]]:
    """The implementations that this machine can run, by name, and a line on each package that cannot run.

    torchembed's own kernels need a GPU or Triton's interpreter, and torchembed's wheels under ``build/peers``.
    """
    found: dict[str, Rotate] = {"ropelab": _ropelab, MUTANT: with_wrong_backward(_ropelab)}
    missing = []
    for version in VERSIONS:
        name = f"torchembed {version}"
        if not (torch.cuda.is_available() or INTERPRETED):
            missing.append(f"{name}: its kernel needs a GPU or TRITON_INTERPRET=1")
            continue
        try:
            module = packages.load_file("torchembed", version, "torchembed/_triton.py")
        except packages.NotInstalled as error:
            missing.append(f"{name}: {error}")
        else:
            # The public function rotates a q and a k, and calls this step for each of them.
            found[name] = module._FusedRoPE.apply
    return found, missing


def wrong_one(found: dict[str, Rotate]) -> str:
    """The faulty implementation to show: the real package where it runs, the mutant elsewhere."""
    return WRONG_PACKAGE if WRONG_PACKAGE in found else MUTANT


def _ropelab(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="bhsd")


def definition(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`ropelab.reference.rotate` in this module's convention."""
    return reference.rotate(x, cos, sin, seq_format="bhsd")


def closed_form(angle):
    """The relative error of the gradient of one plane, ``2 |sin a|``; ``angle`` is any array, in rad."""
    return 2 * abs(np.sin(angle))


def expected_error(grad: torch.Tensor, sin: torch.Tensor) -> float:
    """The relative L2 error of the faulty gradient: ``sqrt(sum 4 sin^2(a) |g|^2 / sum |g|^2)``.

    Args:
        grad: the cotangent, ``[..., S, R]``, split-half.
        sin: the sines, ``[S, R/2]``.
    """
    energy = grad.double().square().unflatten(-1, (2, -1)).sum(-2)
    return ((4 * sin.double().square() * energy).sum() / energy.sum()).sqrt().item()


def gradient_errors(rotate: Rotate, seq_len: int, *, rotary_dim: int = 64, seed: int = 0) -> pd.DataFrame:
    """Relative error of the float32 gradient of each position and plane, under a random cotangent.

    Returns:
        Columns position, plane, angle (rad), error, closed_form, bound (of the rounding in ``error``).
    """
    x, g, _, (cos, sin) = _problem(seq_len, rotary_dim, torch.float32, seed)
    right = reference.rotate(g, cos, sin, seq_format="bhsd", inverse=True)
    wrong = _gradient(rotate, x, g, cos.float(), sin.float()) - right
    b0, b1 = rotation_bound(
        *map(exact, g.chunk(2, -1)), exact(cos), exact(sin), bound_evidence.arithmetic(torch.float32)
    )
    rounding = np.sqrt((b0**2 + b1**2).sum((0, 1))).astype(float)

    position, plane = np.indices(rounding.shape)
    angle = position * inverse_frequencies(rotary_dim).numpy()
    size = _plane_norms(g)
    columns = {
        "position": position,
        "plane": plane,
        "angle": angle,
        "error": _plane_norms(wrong) / size,
        "closed_form": closed_form(angle),
        "bound": rounding / size,
    }
    return pd.DataFrame({name: values.ravel() for name, values in columns.items()})


def overall_errors(
    found: dict[str, Rotate], seq_lens=(1, 8, 128), *, rotary_dim: int = 64, seed: int = 0
) -> pd.DataFrame:
    """The error and the norm of the whole gradient.

    Returns:
        Columns implementation, seq_len, error (relative L2), expected_error (the error of
        a repeated forward), norm_ratio (the norm of the gradient over the norm of the right gradient).
    """
    rows = []
    for name, rotate in found.items():
        for seq_len in seq_lens:
            x, g, _, (cos, sin) = _problem(seq_len, rotary_dim, torch.float32, seed)
            gradient = _gradient(rotate, x, g, cos.float(), sin.float()).double()
            right = reference.rotate(g, cos, sin, seq_format="bhsd", inverse=True)
            rows.append(
                {
                    "implementation": name,
                    "seq_len": seq_len,
                    "error": ((gradient - right).norm() / right.norm()).item(),
                    "expected_error": expected_error(g, sin),
                    "norm_ratio": (gradient.norm() / right.norm()).item(),
                }
            )
    return pd.DataFrame(rows)


def checks() -> dict[str, Callable[[Rotate], bool]]:
    """Tests of a gradient that people write, by name; each says whether an implementation passes.

    All tests are in float64, where rounding is 1e-16 and the fault is of order 1, so ``TOLERANCE`` needs no tuning.
    """

    def on(seq_len: int, check: Callable[..., bool]) -> Callable[[Rotate], bool]:
        def passes(rotate: Rotate) -> bool:
            x, g, ones, (cos, sin) = _problem(seq_len, 8, torch.float64, seed=0)
            return bool(check(rotate, x, g, ones, cos, sin))

        return passes

    def usable(rotate, x, g, ones, cos, sin):
        gradient = _gradient(rotate, x, g, cos, sin)
        return gradient is not None and gradient.shape == x.shape and gradient.isfinite().all()

    def forward(rotate, x, g, ones, cos, sin):
        return _close(rotate(x, cos, sin), definition(x, cos, sin))

    def length(rotate, x, g, ones, cos, sin):
        return _close(_gradient(rotate, x, g, cos, sin).norm(), g.norm())

    def against_reference(cotangent):
        def check(rotate, x, g, ones, cos, sin):
            sent = ones if cotangent == "sum" else g
            return _close(_gradient(rotate, x, sent, cos, sin), _gradient(definition, x, sent, cos, sin))

        return check

    def adjoint(rotate, x, g, ones, cos, sin):
        return _close((rotate(x, cos, sin) * g).sum(), (x * _gradient(rotate, x, g, cos, sin)).sum())

    def quadratic(rotate, x, g, ones, cos, sin):
        return _close(_gradient(rotate, x, rotate(x, cos, sin), cos, sin), x)

    def gradcheck(rotate, x, g, ones, cos, sin):
        leaf = x.clone().requires_grad_()
        return torch.autograd.gradcheck(lambda t: rotate(t, cos, sin), leaf, fast_mode=True, raise_exception=False)

    return {
        "forward = definition, S = 8": on(8, forward),
        "not None, right shape, finite, S = 8": on(8, usable),
        "‖gradient‖ = ‖cotangent‖, S = 8": on(8, length),
        "sum() loss against autograd, S = 1": on(1, against_reference("sum")),
        "random cotangent against autograd, S = 1": on(1, against_reference("random")),
        "gradcheck, S = 1": on(1, gradcheck),
        "sum() loss against autograd, S = 8": on(8, against_reference("sum")),
        "random cotangent against autograd, S = 8": on(8, against_reference("random")),
        "⟨Rx, g⟩ = ⟨x, gradient⟩, S = 8": on(8, adjoint),
        "gradient of ½‖Rx‖² = x, S = 8": on(8, quadratic),
        "gradcheck, S = 4": on(4, gradcheck),
    }


TOLERANCE = 1e-9


def check_outcomes(found: dict[str, Rotate]) -> pd.DataFrame:
    """Whether each implementation passes each check: index check, a bool column per implementation."""
    rows = {check: {name: passes(rotate) for name, rotate in found.items()} for check, passes in checks().items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("check")


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a - b).norm() <= TOLERANCE * b.norm()


def _gradient(rotate: Rotate, x, g, cos, sin) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(rotate(leaf, cos, sin), leaf, g)[0]


def _problem(seq_len: int, rotary_dim: int, dtype: torch.dtype, seed: int):
    """Input, random cotangent, the cotangent that sum() sends (strides 0), and float64 tables."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, seq_len, rotary_dim)
    x, g = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(bound_evidence.device(), dtype)
        for _ in range(2)
    )
    ones = torch.ones((), dtype=dtype, device=x.device).expand(shape)
    return x, g, ones, ropelab.rotary_table(seq_len, rotary_dim, dtype=torch.float64, device=x.device)


def _plane_norms(x: torch.Tensor) -> np.ndarray:
    """``[B, H, S, R]`` split-half -> norms over batch, heads and the pair, ``[S, R/2]``."""
    return x.double().unflatten(-1, (2, -1)).square().sum((0, 1, 3)).sqrt().cpu().numpy()
