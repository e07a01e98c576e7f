"""How commands print: numbers in full and prose in one line, however narrow what takes them seems to be."""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType
from rich.text import Text

_PLAIN_WIDTH = 150  # of what is not a terminal, and says no width
_ANY_WIDTH = 10_000


def stdout_console() -> Console:
    """Where a command's results go; as wide as most tables where nothing says how wide it is."""
    console = Console(highlight=False)
    told = console.is_terminal or "COLUMNS" in os.environ
    return console if told else Console(highlight=False, width=_PLAIN_WIDTH)


def print_prose(console: Console, text: str | Text, style: str | None = None) -> None:
    """A sentence; a terminal wraps it between words, and elsewhere it stays in one line."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def print_whole(console: Console, table: RenderableType) -> None:
    """A table of numbers, which is rather wider than the terminal than cut."""
    natural = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
    if natural <= console.width:
        console.print(table)
    elif not console.quiet:
        Console(file=console.file, highlight=False, width=natural).print(table)


def can_write(text: str) -> bool:
    """Whether stdout takes these characters, as one in latin-1 does not take all."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def spinner() -> str:
    """The name of one that stdout can write."""
    return "dots" if can_write("⠋") else "line"


def counted(number: int, noun: str) -> str:
    """A number of things, in words.

    >>> counted(1, "cpu rank"), counted(2_000, "step")
    ('1 cpu rank', '2,000 steps')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
