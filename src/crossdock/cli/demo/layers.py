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
    capacity: int | None
    fill: float | None
    overflows: int
    sent_rows_bytes: int
    saved_bytes: int


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
                capacity=mine.capacity if mine.capacity > 0 else None,
                fill=demand / mine.capacity if mine.capacity > 0 else None,
                overflows=overflows,
                sent_rows_bytes=sent_rows_bytes,
                saved_bytes=saved_bytes,
            )
        )
    return tuple(lines)
