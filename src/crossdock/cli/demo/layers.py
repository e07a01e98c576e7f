"""What every layer of a run did, over all ranks: a line of the report's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from crossdock import RowCapacity, TokenDispatcher

from .parallel import gathered


@dataclass(frozen=True)
class LayerLine:
    """One layer's account in one run.

    Attributes:
        run: which run.
        layer: the layer's name.
        dispatches: how many.
        tokens: that all ranks brought to them.
        rows: that reached all ranks' experts.
        dropped: rows that were asked for and had no room.
        imbalance: the busiest expert's rows over the mean.
        row_capacity: what its dispatches were asked to be.
        capacity: rows of a rank, at the end; 0 where no dispatch has come since it changed; None under `exact`, and of
            the dispatch that calibrates a layer.
        fill: the largest demand of a dispatch over that capacity.
        overflows: dispatches that dropped rows, counted on every rank.
        sent_rows_bytes: of rows that ranks sent to each other, forward and backward.
        saved_bytes: of rows that all ranks keep for the backward of a combine.
    """

    run: str
    layer: str
    dispatches: int
    tokens: int
    rows: int
    dropped: int
    imbalance: float
    row_capacity: str
    capacity: int | None
    fill: float | None
    overflows: int
    sent_rows_bytes: int
    saved_bytes: int

    @property
    def room(self) -> str:
        """The capacity in words, and how much of it was wanted."""
        if self.fill is not None:
            return f"{self.capacity:,}, {self.fill:.0%}"
        if self.row_capacity == str(RowCapacity.exact()):
            return "exact"
        return "just changed" if self.capacity == 0 else "just measured"


def told_apart(names: Sequence[str]) -> list[str]:
    """Names of layers without the dotted parts that all begin and end with.

    >>> told_apart(["blocks.0.moe", "blocks.1.moe"]), told_apart(["blocks.0.moe"])
    (['0', '1'], ['blocks.0.moe'])
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    before = _num_alike(parts)
    after = _num_alike([part[:before:-1] for part in parts])  # of what comes behind the first part that differs
    short = [".".join(part[before : len(part) - after]) for part in parts]
    return short if all(short) else list(names)


def _num_alike(lists: Sequence[Sequence[str]]) -> int:
    """How many first elements are the same in all of them."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False)))


def layer_lines(run: str, dispatcher: TokenDispatcher, group: Any = None) -> tuple[LayerLine, ...]:
    """A line for every layer of a dispatcher over all ranks of the demo; collective."""
    lines = []
    for name, mine in sorted(dispatcher.stats().layers.items()):
        numbers = [mine.tokens, mine.rows, mine.rows_wanted, mine.overflows, mine.sent_rows_bytes, mine.saved_bytes]
        numbers.append(mine.largest_demand)
        told = torch.tensor([*numbers, *mine.wanted_by_expert], device=dispatcher.device)
        by_rank = torch.stack(gathered(told, group)).cpu()
        tokens, rows, wanted, overflows, sent_rows_bytes, saved_bytes = by_rank[:, :6].sum(0).tolist()
        demand, by_expert = int(by_rank[:, 6].max()), by_rank[:, 7:].double()
        lines.append(
            LayerLine(
                run=run,
                layer=name,
                dispatches=mine.calls,
                tokens=tokens,
                rows=rows,
                dropped=wanted - rows,
                imbalance=float(by_expert.max() / by_expert.mean()) if wanted else 1.0,
                row_capacity=str(dispatcher.config.row_capacity),
                capacity=mine.capacity if mine.capacity >= 0 else None,
                fill=demand / mine.capacity if mine.capacity > 0 else None,
                overflows=overflows,
                sent_rows_bytes=sent_rows_bytes,
                saved_bytes=saved_bytes,
            )
        )
    return tuple(lines)
