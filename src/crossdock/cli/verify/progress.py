"""How far `verify` is, told on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence

from rich.console import Console

from crossdock.testing import Cell, CellResult

from ..output import counted
from ..progress import bar, say
from .plan import Plan

_LINE_EVERY_S = 10.0

Results = Sequence[Sequence[CellResult]]


def with_progress(plan: Plan, done: Results) -> Generator[Cell, None, None]:
    """The plan's cells, one after the other; `done` has the results of those that went before."""
    console = Console(file=sys.stderr)
    return _in_a_bar(plan, console) if console.is_terminal else in_lines(plan, done)


def in_lines(plan: Plan, done: Results, every_s: float = _LINE_EVERY_S) -> Generator[Cell, None, None]:
    """See `with_progress`: one line at the beginning, then one when `every_s` have passed since the last."""
    say("verify", f"{counted(len(plan.cells), 'cell')} on {plan.where}")
    start = last = time.monotonic()
    for cell in plan.cells:
        yield cell
        now = time.monotonic()
        if now - last >= every_s:
            counts = Counter(result.status for results in done for result in results)
            checks = f"{counted(counts['passed'], 'check')} passed, {counts['failed']} failed"
            say("verify", f"{len(done)} of {len(plan.cells)} cells, {checks}, {now - start:.0f} s")
            last = now


def _in_a_bar(plan: Plan, console: Console) -> Generator[Cell, None, None]:
    with bar(console) as progress:
        task = progress.add_task("verify", total=len(plan.cells))
        for cell in plan.cells:
            progress.update(task, description=str(cell)[:60].ljust(60))
            yield cell
            progress.advance(task)
