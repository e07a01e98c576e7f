"""What every layer of a run did, over all ranks: a line of the report's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crossdock import TokenDispatcher

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
        capacity: rows of a rank, at the end; None under `exact`.
        fill: the largest demand of a dispatch over that capacity.
        overflows: dispatches that dropped rows, counted on every rank.
    """

    run: str
    layer: str
    dispatches: int
    tokens: int
    rows: int
    dropped: int
    imbalance: float
    capacity: int | None
    fill: float | None
    overflows: int


def layer_lines(run: str, dispatcher: TokenDispatcher, group: Any = None) -> tuple[LayerLine, ...]:
    """A line for every layer of a dispatcher over all ranks of the demo; collective."""
    lines = []
    for name, mine in sorted(dispatcher.stats().layers.items()):
        numbers = [mine.tokens, mine.rows, mine.rows_wanted, mine.overflows, mine.largest_demand]
        told = torch.tensor([*numbers, *mine.wanted_by_expert], device=dispatcher.device)
        by_rank = torch.stack(gathered(told, group)).cpu()
        tokens, rows, wanted, overflows, _ = by_rank[:, :5].sum(0).tolist()
        demand, by_expert = int(by_rank[:, 4].max()), by_rank[:, 5:].double()
        lines.append(
            LayerLine(
                run=run,
                layer=name,
                dispatches=mine.calls,
                tokens=tokens,
                rows=rows,
                dropped=wanted - rows,
                imbalance=float(by_expert.max() / by_expert.mean()) if wanted else 1.0,
                capacity=mine.capacity if mine.capacity > 0 else None,
                fill=demand / mine.capacity if mine.capacity > 0 else None,
                overflows=overflows,
            )
        )
    return tuple(lines)
