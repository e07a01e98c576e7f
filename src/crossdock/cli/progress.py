"""How far a command is, told on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Stages(Protocol):
    """Is told what a command does next."""

    def expect(self, total: int) -> None:
        """From here on there are so many stages."""

    def begin(self, what: str) -> None:
        """A stage begins, or what comes before the first one."""

    def end(self) -> None:
        """A stage has ended."""


@contextmanager
def stages(command: str, shown: bool = True) -> Iterator[Stages]:
    """Tells of a command's stages for the time of a `with`; of nothing where it is not to be `shown`."""
    console = Console(file=sys.stderr)
    if shown and not console.is_terminal:
        yield _Lines(command)
        return
    with bar(console, shown) as progress:
        yield _Bar(progress)


def bar(console: Console, shown: bool = True) -> Progress:
    """A bar that goes away when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=not shown
    )


def say(command: str, text: str) -> None:
    """A line of its own."""
    print(f"crossdock {command}: {text}", file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress, self._task = progress, progress.add_task("", total=None)

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def begin(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def end(self) -> None:
        self._progress.advance(self._task)


class _Lines:
    def __init__(self, command: str) -> None:
        self._command, self._number, self._total = command, 0, 0

    def expect(self, total: int) -> None:
        self._total = total

    def begin(self, what: str) -> None:
        say(self._command, f"{self._number + 1} of {self._total}: {what}" if self._total else what)

    def end(self) -> None:
        self._number += 1
