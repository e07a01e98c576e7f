"""What `bench` says at its end: a table for each workload, the bars, notes, and a JSON record of everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from crossdock.bench.bars import NUM_RANKS, Verdict, hold_against_bars
from crossdock.bench.movements.figures import Figure
from crossdock.bench.movements.operations import COMBINE, DISPATCH

from ..environment import describe_run
from ..output import counted, print_prose, print_whole, stdout_console
from ..paths import write_record
from .plan import Plan
from .run import Finished

_WIDE = 125  # a terminal below it gets the columns that matter most
_NOTHING = "-"
_UNITS = {"f": "of the floor", DISPATCH: "of dispatch", COMBINE: "of combine"}  # of bars


class Column(NamedTuple):
    """A column of figures.

    Attributes:
        title: above it.
        text: what it says of a figure.
        always: whether a narrow terminal has it.
        told: what it means.
        on_cpu: whether it means anything there.
    """

    title: str
    text: Callable[[Figure], str]
    always: bool
    told: str = ""
    on_cpu: bool = True


_COLUMNS = (
    Column("mode", lambda f: f.mode, True, on_cpu=False),
    Column("us", lambda f: f"{f.us.median:.1f}", True, "the slowest rank's median of all repeats"),
    Column("10 to 90 %", lambda f: f"{f.us.p10:.1f}-{f.us.p90:.1f}", False),
    Column("noise %", lambda f: _number(f.noise_pct, 1, ".1f"), False, "how far the runs' medians lie apart"),
    Column(
        "MB once / copies",
        lambda f: f"{f.once_bytes / 1e6:.3g} / {f.copies_bytes / 1e6:.3g}",
        False,
        "rows of the busiest rank that cross to others, once for each rank that wants them, and once for each expert",
    ),
    Column("GB/s", lambda f: f"{f.gb_per_s:.3g}" if f.gb_per_s >= 0.01 else "<0.01", True),
    Column(
        "% of floor",
        lambda f: _number(f.pct_of_floor, 1, ".0f"),
        True,
        "of the time that the ceilings above leave, 100 % is the floor itself",
        on_cpu=False,  # Python and Gloo take the time there, which is no matter of bytes
    ),
    Column(
        "SMs",
        lambda f: _NOTHING if f.contender.num_sms is None else str(f.contender.num_sms),
        False,
        "the most blocks of a kernel, - where the backend chooses",
    ),
    Column("host us", lambda f: _number(f.host_us, 1, ".0f"), True, "of the call, the device idle"),
    Column("in grad mode", lambda f: _number(f.host_grad_us, 1, ".0f"), True, "the same there"),
    Column(
        "kept MB", lambda f: _number(f.persistent_bytes, 1e6, ".1f"), False, "all its life, as the dispatcher tells"
    ),
    Column("peak MB", lambda f: _number(f.peak_bytes, 1e6, ".1f"), False, "of a call"),
)
INTERPRETED = "On a CPU the kernels of symmetric are interpreted, for tests: their times tell nothing of a GPU."


def report(plan: Plan, finished: Finished) -> bool:
    """Print everything, and write the files that were asked for; False if that could not be done."""
    if plan.plot is not None and finished.figures:
        from .plot import save_plot

        save_plot(plan.plot, finished.figures, plan.place.words)
    console = stdout_console()
    print_prose(console, f"{plan.place.words}; ceilings: {finished.ceilings}\n")
    for workload in dict.fromkeys(figure.workload for figure in finished.figures):
        figures = [figure for figure in finished.figures if figure.workload == workload]
        print_prose(console, str(workload), "bold")
        print_whole(console, table_of(figures, columns_of(figures, plan.device_type, console.width)))
    if finished.figures:
        shown = columns_of(finished.figures, plan.device_type, console.width)
        print_prose(console, "; ".join(f"{column.title}: {column.told}" for column in shown if column.told), "dim")
    if any(figure.contender.is_interpreted(plan.device_type) for figure in finished.figures):
        print_prose(console, INTERPRETED)
    if plan.bars:
        title, table = bars_of(plan, hold_against_bars(finished.figures))
        print_prose(console, f"\n{title}", "bold")
        print_whole(console, table)
    for note in _notes(finished):
        print_prose(console, note)
    print_prose(console, summary_of(finished))
    content = json.dumps(as_dict(plan, finished), indent=1) + "\n"
    return plan.json is None or write_record("bench", "--json", plan.json, content)


def summary_of(finished: Finished) -> str:
    """The last line: how much was measured."""
    measured = "nothing was measured"
    if finished.figures:
        measured = f"{counted(len(finished.figures), 'figure')}, all checked before"
    failed = f", {len(finished.failed)} failed" if finished.failed else ""
    return f"{measured}{failed}, in {finished.seconds:.0f} s"


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


def columns_of(figures: Sequence[Figure], device_type: str, width: int) -> list[Column]:
    """Those that have something to say of some figure on this type of device, and room."""
    return [
        column
        for column in _COLUMNS
        if (column.always or width >= _WIDE)
        and (column.on_cpu or device_type != "cpu")
        and any(column.text(figure) != _NOTHING for figure in figures)
    ]


def table_of(figures: Sequence[Figure], columns: Sequence[Column]) -> Table:
    """All contenders in one workload, operation by operation."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
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


def bars_of(plan: Plan, verdicts: Sequence[Verdict]) -> tuple[str, Table]:
    """Every bar beside what was reached, and a title."""
    title = f"bars of symmetric, set for {NUM_RANKS} NVLink GPUs; here: {plan.place.words}"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("what", "mode", "bar", "reached", "unit", ""):
        table.add_column(column, justify="right" if column in ("bar", "reached") else "left", no_wrap=True)
    words = {True: Text("met", "green"), False: Text("missed", "red"), None: Text("not measured", "dim")}
    for verdict in verdicts:
        bar = verdict.bar
        reached = _number(verdict.reached, 1, ".2f")
        table.add_row(
            str(bar), bar.mode, f"{bar.limit:.2f}", reached, _UNITS.get(bar.unit, bar.unit), words[verdict.met]
        )
    return title, table


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
    return _NOTHING if value is None else format(value / unit, form)
