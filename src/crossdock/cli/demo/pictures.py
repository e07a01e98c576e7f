"""Two pictures: the loss over the steps, and how evenly the experts were loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..output import counted
from .progress import imbalance
from .train import Trained

_BLUE, _ORANGE, _GREY = "#2563a8", "#d9722e", "#8a8a8a"


def save_loss(path: Path, trained: Trained) -> None:
    """Training loss by step, smoothed, between its marks: guessing, and the held-out text before and after."""
    figure, axes = _figure((8, 4.5))
    steps = range(1, len(trained.losses) + 1)
    axes.plot(steps, trained.losses, color=_BLUE, alpha=0.3, linewidth=1, label="training batch")
    axes.plot(steps, smoothed(trained.losses), color=_BLUE, linewidth=2, label="smoothed")
    held_out = [trained.held_out_before, trained.held_out_after]
    axes.plot([0, len(trained.losses)], held_out, "o", color=_ORANGE, markersize=7, label="held-out text")
    axes.annotate(
        f"{trained.held_out_after:.2f}", (len(trained.losses), trained.held_out_after), textcoords="offset points",
        xytext=(0, 10), ha="center", color=_ORANGE, fontweight="bold",
    )  # fmt: skip
    axes.axhline(math.log(256), color=_GREY, linewidth=1, linestyle=":")
    axes.text(len(trained.losses), math.log(256), "guessing: ln 256 ", color=_GREY, ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_title(
        f"{trained.num_parameters / 1e6:.1f} M parameters on {trained.source}, {_ranks(trained)}", loc="left"
    )
    axes.legend(frameon=False, loc="lower left")
    _save(figure, path)


def save_expert_load(path: Path, trained: Trained) -> None:
    """For each layer a map of tokens by expert and step, over the mean; below, the busiest expert over the mean."""
    loads = torch.tensor(trained.tokens_per_expert, dtype=torch.float64)  # [steps, layers, experts]
    num_steps, num_layers, num_experts = loads.shape
    figure, axes = _figure((8, 2.1 * num_layers + 2.4), num_layers + 1)
    image = None
    for layer, place in enumerate(axes[:-1]):
        over_mean = loads[:, layer] / loads[:, layer].mean(1, keepdim=True)
        image = place.imshow(
            over_mean.T.tolist(), aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest",
            extent=(0.5, num_steps + 0.5, num_experts - 0.5, -0.5),
        )  # fmt: skip
        place.set(ylabel=f"layer {layer}\nexpert")
        place.set_yticks(range(0, num_experts, max(1, num_experts // 8)))
        place.tick_params(labelbottom=False)
        by_step = [imbalance(step[layer]) for step in trained.tokens_per_expert]
        axes[-1].plot(range(1, num_steps + 1), smoothed(by_step), linewidth=2, label=f"layer {layer}")
    axes[0].set_title(f"Tokens of each expert over the mean, {num_experts} experts on {_ranks(trained)}", loc="left")
    axes[-1].axhline(1.0, color=_GREY, linewidth=1, linestyle=":")
    axes[-1].set(xlabel="step", ylabel="busiest expert\nover the mean", xlim=(0.5, num_steps + 0.5), ylim=(0, None))
    axes[-1].legend(frameon=False, ncols=num_layers, loc="upper right")
    figure.colorbar(image, ax=list(axes[:-1]), label="1 = the mean", extend="max", pad=0.02)
    figure.align_ylabels()
    _save(figure, path)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours: a fortieth of the curve to either side, fewer near the ends."""
    curve = []
    for i in range(len(values)):
        reach = min(len(values) // 40, i, len(values) - 1 - i)
        curve.append(sum(values[i - reach : i + reach + 1]) / (2 * reach + 1))
    return curve


def _ranks(trained: Trained) -> str:
    return counted(trained.num_ranks, "rank")


def _figure(size: tuple[float, float], num_rows: int = 1) -> tuple[Any, Any]:
    """A figure that is drawn into a file and never onto a screen, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, sharex=False)
    for place in [axes] if num_rows == 1 else axes:
        place.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
