"""Draw the figures of the notebooks on the algebra and on the gradients. Each title states a finding."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from ropelab.conformance.bounds import fraction
from ropelab.kernels import INTERPRETED
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import computed_here
from ropelab.study.topics.gradients import bound_evidence, wrong_backward

_STYLE = {"axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
_OVER_BOUND = "largest error / derived bound"
_SMALL_LEGEND = {"title": None, "fontsize": 8}


@mpl.rc_context(_STYLE)
def bounds_figure(evidence: pd.DataFrame, faults: pd.DataFrame | None = None) -> Figure:
    """The worst error over the bound: our rotation for each law and dtype, and faulty rotations on a log axis."""
    panels = 1 if faults is None else 2
    fig, axes = plt.subplots(1, panels, figsize=(6 + 4.6 * (panels - 1), 4.2), squeeze=False, layout="constrained")
    ax = axes[0, 0]
    dots = {"dodge": True, "jitter": False, "size": 7, "palette": COLORBLIND[: evidence.law.nunique()]}
    sns.stripplot(evidence, x="dtype", y="fraction", hue="law", ax=ax, **dots)
    ax.axhline(1, color="black", lw=1)
    ax.text(-0.45, 1.02, "derived bound", va="bottom", fontsize=9)
    worst = evidence.fraction.max()
    holds = "Every error stays within its bound" if worst <= 1 else "A bound is broken"
    ax.set(ylim=(-0.03, max(1.45, worst * 1.3)), xlabel="dtype of q and k (two dots: the two layouts)",
           ylabel=_OVER_BOUND, title=f"{holds}: the worst reaches {worst:.3f} of it")  # fmt: skip
    ax.legend(**_SMALL_LEGEND, loc="upper left", ncols=2, frameon=False, columnspacing=0.8, handletextpad=0.1)
    if faults is not None:
        _fault_panel(axes[0, 1], faults)
    return _finish(fig, bound_evidence.backend())


def _fault_panel(ax, faults: pd.DataFrame) -> None:
    dots = {"jitter": False, "size": 8, "palette": COLORBLIND[: faults.dtype.nunique()]}
    sns.stripplot(faults, y="fault", x="fraction", hue="dtype", ax=ax, **dots)  # bars on a log axis begin nowhere
    ax.axvline(1, color="black", lw=1)
    caught, mildest = (faults.fraction > 1).sum(), faults.fraction.min()
    verdict = "" if caught == len(faults) else f"{caught} of {len(faults)} cases of "
    title = f"The bound rejects {verdict}{faults.fault.nunique()} faults in {faults.dtype.nunique()} dtypes"
    label = f"{_OVER_BOUND} (of the mildest fault: {mildest:.0f})"
    ax.set(xscale="log", xlim=(0.3, None), ylabel="", xlabel=label, title=title)
    ax.legend(**_SMALL_LEGEND, loc="upper right")


@mpl.rc_context(_STYLE)
def wrong_backward_figure(errors: pd.DataFrame, name: str) -> Figure:
    """The measured gradient error of each position and plane: against the angle with the closed form, and as a map."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(1.15, 1))
    turn = np.linspace(0, 2 * np.pi, 400)
    left.plot(turn, wrong_backward.closed_form(turn), color=COLORBLIND[1], lw=3.5, label="closed form 2 |sin θ|")
    gap = fraction((errors.error - errors.closed_form).to_numpy(), errors.bound.to_numpy())
    label = f"{name}: {len(errors)} positions and planes,\nwithin {gap:.2f} of the rounding bound"
    points = {"color": COLORBLIND[0], "lw": 0, "zorder": 3, "label": label}
    left.scatter(errors.angle % (2 * np.pi), errors.error, s=6, **points)
    title = f"The error {'follows' if gap <= 1 else 'departs from'} 2 |sin θ|"
    left.set(xlabel="angle θ (rad, modulo 2π)", ylabel="relative error of the gradient", ylim=(0, 2.8), title=title)
    left.set_xticks(np.pi * np.arange(0, 2.5, 0.5), ["0", "π/2", "π", "3π/2", "2π"])
    left.legend(fontsize=9, loc="upper left", frameon=False)

    grid = errors.pivot(index="plane", columns="position", values="error")
    image = right.pcolormesh(grid.columns, grid.index, grid, cmap="cividis", vmin=0, vmax=2, shading="nearest")
    fig.colorbar(image, ax=right, label="relative error of the gradient")
    right.invert_yaxis()
    title = f"Wrong by more than 100% in {(errors.error > 1).mean():.0%} of the map"
    right.set(xlabel="position", ylabel="plane (0 = highest frequency)", title=title)
    return _finish(fig, bound_evidence.backend() if name == wrong_backward.MUTANT else _where())


def _where() -> str:
    """The device or the interpreter that ran other packages' code."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "Triton's interpreter on the CPU" if INTERPRETED else "torch on the CPU"


def _finish(fig: Figure, where: str) -> Figure:
    """Finish the axes, and add the footer: the device, the version of torch, and the date."""
    for ax in fig.axes:
        if ax.get_lines() or ax.collections:
            sns.despine(ax=ax)
    fig.supxlabel(computed_here(where), fontsize=7.5, color="0.4", x=0.99, ha="right")
    plt.close(fig)  # the notebook shows the figure that it returns
    return fig
