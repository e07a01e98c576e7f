"""What rank 0 shows while the model trains: a bar, the loss, the speed, and how the experts are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text as Line

from ..output import can_write, spinner

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_PLAIN_LINES = 10  # where there is no terminal to redraw


def imbalance(tokens_per_expert: Sequence[int]) -> float:
    """The busiest expert's tokens over the mean: 1.0 is perfectly balanced."""
    total = sum(tokens_per_expert)
    return max(tokens_per_expert) * len(tokens_per_expert) / total if total else 1.0


def load_bars(tokens_per_expert: Sequence[int], bars: str = _BARS) -> str:
    """One character an expert, as high as its share of twice the mean.

    >>> load_bars([0, 4, 8, 4]), load_bars([0, 4, 8, 4], _PLAIN_BARS)
    ('▁▅█▅', '_=#=')
    """
    twice_mean = 2 * sum(tokens_per_expert) / len(tokens_per_expert) or 1
    return "".join(bars[min(int(count / twice_mean * len(bars)), len(bars) - 1)] for count in tokens_per_expert)


class TrainingDisplay:
    """Redrawn after every step on a terminal; elsewhere a plain line at first and after each tenth of the training.

    Args:
        steps: how many there will be.
        shown: False on all ranks but one.
    """

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps = steps
        self._console = Console(quiet=not shown, highlight=False)
        self._bars = _BARS if can_write(_BARS) else _PLAIN_BARS
        self._bar = Progress(
            SpinnerColumn(spinner()),
            TextColumn("training"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/]"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=steps, loss="-", speed="")
        # Drawn by hand after each step: a thread that redraws would take time from this rank's only core.
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, at)

    def show(self, step: int, loss: float, tokens_per_s: float, tokens_per_expert: Sequence[Sequence[int]]) -> None:
        """Tell what step number `step` (from 0) gave; `tokens_per_expert` is by layer."""
        done, speed = step + 1, f"{tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=done, loss=f"{loss:.3f}", speed=speed)
        if self._live is not None:
            self._live.update(self._drawn(tokens_per_expert), refresh=True)
        elif step == 0 or done * _PLAIN_LINES // self._steps > step * _PLAIN_LINES // self._steps:
            loads = ", ".join(f"{imbalance(load):.2f}" for load in tokens_per_expert)
            line = f"step {done:>{len(str(self._steps))}} of {self._steps}: loss {loss:.3f}, {speed}"
            self._console.print(f"{line}, busiest expert over the mean, by layer: {loads}", soft_wrap=True)

    def _drawn(self, tokens_per_expert: Sequence[Sequence[int]]) -> RenderableType:
        rows: list[RenderableType] = [self._bar]
        for layer, load in enumerate(tokens_per_expert):
            row = Line(f"  layer {layer}  ")
            row.append(load_bars(load, self._bars), style="cyan")
            row.append(f"  {min(load):,} to {max(load):,} tokens, busiest {imbalance(load):.2f} x the mean")
            rows.append(row)
        return Group(*rows)
