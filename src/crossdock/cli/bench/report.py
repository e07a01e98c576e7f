"""What `bench` says at its end: a table for each workload, the bars, notes, and a JSON record of everything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossdock.bench.bars import NUM_RANKS, Verdict, hold_against_bars
from crossdock.bench.movements.figures import Figure
from crossdock.bench.movements.workloads import Workload

from ..environment import describe_run
from ..paths import write_record
from .plan import Plan
from .run import Finished

_PLAIN_WIDTH = 150  # of what is not a terminal, and says no width
_WIDE = 125  # a terminal below it gets the columns that matter most


class Column(NamedTuple):
    """A column of figures: its title, its text, and whether a narrow terminal has it."""

    title: str
    text: Callable[[Figure], str]
    always: bool


_COLUMNS = (
    Column("mode", lambda f: f.mode, True),
    Column("us", lambda f: f"{f.us.median:.1f}", True),
    Column("10 to 90 %", lambda f: f"{f.us.p10:.1f}-{f.us.p90:.1f}", False),
    Column("noise %", lambda f: _number(f.noise_pct, 1, ".1f"), False),
    Column("MB once / copies", lambda f: f"{f.once_bytes / 1e6:.3g} / {f.copies_bytes / 1e6:.3g}", False),
    Column("GB/s", lambda f: f"{f.gb_per_s:.3g}" if f.gb_per_s >= 0.01 else "<0.01", True),
    Column("% of f", lambda f: _number(f.pct_of_floor, 1, ".0f"), True),
    Column("SMs", lambda f: "auto" if f.contender.num_sms is None else str(f.contender.num_sms), False),
    Column("host us / grad", lambda f: f"{_number(f.host_us, 1, '.0f')} / {_number(f.host_grad_us, 1, '.0f')}", True),
    Column("kept MB", lambda f: _number(f.persistent_bytes, 1e6, ".1f"), False),
    Column("peak MB", lambda f: _number(f.peak_bytes, 1e6, ".1f"), False),
)
LEGEND = (
    "us: the slowest rank's median of all repeats; noise: how far the runs' medians lie apart; MB: rows of the busiest"
    " rank that cross to others, once for each rank that wants them, and once for each expert; f: the floor at the"
    " ceilings above, 100 % is the floor itself; host us: of the call, the device idle, and in grad mode; kept: all its"
    " life, as the dispatcher tells; peak: of a call."
)
INTERPRETED = (
    "On a CPU the kernels of symmetric are interpreted, for tests: their times tell nothing of a GPU, so that no % of f"
    " is told."
)


def report(plan: Plan, finished: Finished) -> bool:
    """Print everything, and write the files that were asked for; False if that could not be done."""
    if plan.plot is not None and finished.figures:
        from .plot import save_plot

        save_plot(plan.plot, finished.figures, f"{plan.num_ranks} {plan.device_type} ranks")
    console = _console()
    console.print(f"{plan.num_ranks} {plan.device_type} ranks; ceilings: {finished.ceilings}\n", highlight=False)
    for workload in dict.fromkeys(figure.workload for figure in finished.figures):
        figures = [figure for figure in finished.figures if figure.workload == workload]
        console.print(table_of(workload, figures, console.width))
    console.print(LEGEND, style="dim", highlight=False)
    if any(figure.contender.is_interpreted(plan.device_type) for figure in finished.figures):
        console.print(INTERPRETED, highlight=False)
    if plan.bars:
        console.print(bars_of(plan, hold_against_bars(finished.figures)))
    for note in _notes(finished):
        console.print(note, highlight=False, markup=False)
    console.print(f"{len(finished.figures)} figures, all checked before, in {finished.seconds:.0f} s", highlight=False)
    content = json.dumps(as_dict(plan, finished), indent=1) + "\n"
    return plan.json is None or write_record("bench", "--json", plan.json, content)


def _console() -> Console:
    console = Console()
    told = console.is_terminal or "COLUMNS" in os.environ
    return console if told else Console(width=_PLAIN_WIDTH)


def as_dict(plan: Plan, finished: Finished) -> dict[str, Any]:
    """The whole run as plain JSON values."""
    verdicts = hold_against_bars(finished.figures) if plan.bars else []
    return {
        **describe_run(),
        "ranks": plan.num_ranks,
        "device": plan.device_type,
        "effort": asdict(plan.effort),
        "seconds": round(finished.seconds, 1),
        "ceilings": asdict(finished.ceilings),
        "figures": [figure.as_dict() for figure in finished.figures],
        "refused": finished.refused,
        "failed": finished.failed,
        "bars": [{**asdict(verdict), "met": verdict.met} for verdict in verdicts],
    }


def table_of(workload: Workload, figures: Sequence[Figure], width: int) -> Table:
    """All contenders in one workload, operation by operation."""
    columns = [column for column in _COLUMNS if column.always or width >= _WIDE]
    table = Table(title=str(workload), title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for operation in dict.fromkeys(figure.operation for figure in figures):
        table.add_row(Text(operation, "bold"))
        for figure in figures:
            if figure.operation == operation:
                table.add_row(f"  {_who(figure)}", *(column.text(figure) for column in columns))
    return table


def _who(figure: Figure) -> str:
    reduction = "" if figure.contender.reduction == "fast" else f", {figure.contender.reduction}"
    return f"{figure.contender.backend}, {figure.capacity}{reduction}"


def bars_of(plan: Plan, verdicts: Sequence[Verdict]) -> Table:
    """Every bar beside what was reached."""
    title = f"bars of symmetric, set for {NUM_RANKS} NVLink GPUs; here: {plan.num_ranks} {plan.device_type} ranks"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("what", "mode", "bar", "reached", "unit", ""):
        table.add_column(column, justify="right" if column in ("bar", "reached") else "left", no_wrap=True)
    words = {True: Text("met", "green"), False: Text("missed", "red"), None: Text("not measured", "dim")}
    for verdict in verdicts:
        bar = verdict.bar
        reached = _number(verdict.reached, 1, ".2f")
        table.add_row(str(bar), bar.mode, f"{bar.limit:.2f}", reached, bar.unit, words[verdict.met])
    return table


def _notes(finished: Finished) -> list[str]:
    """Who did not take part, who failed, and what could not be captured."""
    notes = [f"not measured: {name}: {why}" for name, why in finished.refused.items()]
    no_graph = {
        f"no graph of {figure.operation}, {figure.contender.backend}, {figure.workload.name}: {figure.no_graph}"
        for figure in finished.figures
        if figure.no_graph is not None
    }
    return [*notes, *sorted(no_graph), *(f"FAILED: {who}: {why}" for who, why in finished.failed.items())]


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)
