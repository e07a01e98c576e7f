"""A picture of figures: time above, percent of the floor below, over the tokens of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossdock.bench.movements.figures import Figure
from crossdock.bench.movements.operations import COMBINE, DISPATCH, PAIR

_OPERATIONS = (DISPATCH, COMBINE, PAIR)
_COLOURS = ("#2563a8", "#d9722e", "#3a8a4d", "#8a4d9e", "#a83232", "#7a6a2f")
_STYLES = {"eager": "-", "graph": "--"}
_GREY = "#8a8a8a"

Line = tuple[str, str]  # who, and how


def save_plot(path: Path, figures: Sequence[Figure], where: str) -> None:
    """Draw forward operations into a PNG; one column for each that was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    names = [name for name in _OPERATIONS if any(figure.operation == name for figure in figures)]
    shapes = list(dict.fromkeys(figure.workload.shape for figure in figures))
    colours = dict(zip(_contenders(figures, shapes), _COLOURS * len(figures), strict=False))
    picture = Picture(figsize=(1.2 + 5.2 * len(names), 8.2), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(2, len(names), squeeze=False, sharex="col", sharey="row")
    for column, name in enumerate(names):
        _draw(axes[:, column], [figure for figure in figures if figure.operation == name], shapes, colours)
        axes[0][column].set_title(name, loc="left", fontweight="bold")
        axes[1][column].set_xlabel("tokens of a rank")
    axes[0][0].set_ylabel("us, slowest rank's median")
    axes[1][0].set_ylabel("% of the floor (100 is the floor)")
    heading = shapes[0] if len(shapes) == 1 else "several shapes"
    picture.suptitle(f"{heading}, {where}", x=0.01, ha="left")
    handles, labels = _legend(axes)
    picture.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    picture.savefig(path, dpi=130, format="png")


def _draw(axes: Any, figures: Sequence[Figure], shapes: Sequence[str], colours: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    for who, mode in dict.fromkeys((_who(figure, shapes), figure.mode) for figure in figures):
        own = sorted(
            (figure for figure in figures if (_who(figure, shapes), figure.mode) == (who, mode)),
            key=lambda figure: figure.workload.num_tokens,
        )
        tokens = [figure.workload.num_tokens for figure in own]
        look = {"color": colours[who], "linestyle": _STYLES[mode], "marker": "o", "markersize": 4}
        axes[0].plot(tokens, [figure.us.median for figure in own], label=f"{who}, {mode}", **look)
        axes[0].fill_between(
            tokens, [figure.us.p10 for figure in own], [figure.us.p90 for figure in own], color=colours[who], alpha=0.15
        )
        if own[0].pct_of_floor is not None:  # else none of this contender has one
            axes[1].plot(tokens, [figure.pct_of_floor for figure in own], **look)
    for shape in shapes:
        floors = sorted({(f.workload.num_tokens, f.floor_us) for f in figures if f.workload.shape == shape})
        if floors:
            axes[0].plot(*zip(*floors, strict=True), color=_GREY, linestyle=":", marker=".", label="floor")
    axes[1].axhline(100, color=_GREY, linestyle=":")
    for place in axes:
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.grid(True, which="major", alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
        place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes[1].set_xticks(sorted({figure.workload.num_tokens for figure in figures}))
    axes[1].minorticks_off()
    axes[1].tick_params(axis="x", rotation=45)


def _who(figure: Figure, shapes: Sequence[str]) -> str:
    contender = figure.contender
    blocks = "" if contender.num_sms is None else f", {contender.num_sms} SMs"
    shape = f" ({figure.workload.shape})" if len(shapes) > 1 else ""
    return f"{contender.backend}, {contender.capacity.kind} rows, {contender.reduction}{blocks}{shape}"


def _contenders(figures: Sequence[Figure], shapes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_who(figure, shapes) for figure in figures))


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Every line once, whatever panels it is in."""
    found = {}
    for place in axes.flat:
        found.update({label: handle for handle, label in zip(*place.get_legend_handles_labels(), strict=True)})
    return list(found.values()), list(found)
