"""What dispatch and combine mean, in the slowest and clearest words; every backend is held against this.

All functions see the whole group at once: arguments and results are lists by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReferenceRows:
    """One rank's experts' rows.

    Attributes:
        rows: `[R, hidden_dim]`, padding rows zero.
        scores: `[R]` float32.
        origin: for every row `(source rank, token, slot)`, None for padding.
        tokens_per_expert: rows of each local expert without padding.
        expert_offsets: inclusive ends of the padded groups.
    """

    rows: torch.Tensor
    scores: torch.Tensor
    origin: list[tuple[int, int, int] | None]
    tokens_per_expert: list[int]
    expert_offsets: list[int]


def dispatch(
    x: Sequence[torch.Tensor],
    topk_scores: Sequence[torch.Tensor],
    topk_expert_ids: Sequence[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    num_rows: int | None = None,
) -> list[ReferenceRows]:
    """Rows by local expert, then source rank, then token, then slot; with `num_rows`, only so many of them."""
    num_local = num_experts // len(x)
    return [
        _rows_of_rank(rank, num_local, x, topk_scores, topk_expert_ids, expert_alignment, num_rows)
        for rank in range(len(x))
    ]


def _rows_of_rank(
    rank: int,
    num_local: int,
    x: Sequence[torch.Tensor],
    topk_scores: Sequence[torch.Tensor],
    topk_expert_ids: Sequence[torch.Tensor],
    alignment: int,
    num_rows: int | None,
) -> ReferenceRows:
    origin: list[tuple[int, int, int] | None] = []
    counts, ends = [], []
    for expert in range(rank * num_local, (rank + 1) * num_local):
        group = [
            (source, token, slot)
            for source, ids in enumerate(topk_expert_ids)
            for token, chosen in enumerate(ids.tolist())
            for slot, expert_id in enumerate(chosen)
            if expert_id == expert
        ]
        start = len(origin)
        origin = [*origin, *group, *[None] * (-len(group) % alignment)][:num_rows]
        counts.append(min(len(group), len(origin) - start))
        ends.append(len(origin))
    rows = x[0].new_zeros(len(origin), x[0].shape[1])
    scores = torch.zeros(len(origin), device=x[0].device)
    for row, place in enumerate(origin):
        if place is not None:
            source, token, slot = place
            rows[row] = x[source][token].detach()
            scores[row] = topk_scores[source][token, slot].detach()
    return ReferenceRows(rows, scores, origin, counts, ends)


def combine(
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[ReferenceRows],
    topk_scores: Sequence[torch.Tensor] | None,
    num_tokens: Sequence[int],
    reduction: str,
) -> list[torch.Tensor]:
    """Sum of every token's rows, weighted by its scores where they are given: `[T, hidden_dim]` by rank."""
    out = []
    for source in range(len(rows)):
        place_of = _places(dispatched, source)
        tokens = [
            _combine_token(
                rows, place_of.get(token, []), None if topk_scores is None else topk_scores[source][token], reduction
            )
            for token in range(num_tokens[source])
        ]
        out.append(torch.stack(tokens) if tokens else rows[0].new_zeros(0, rows[0].shape[1]))
    return out


def _places(dispatched: Sequence[ReferenceRows], source: int) -> dict[int, list[tuple[int, int, int]]]:
    """`(slot, rank, row)` of every token of one source rank, slots ascending."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for rank, there in enumerate(dispatched):
        for row, place in enumerate(there.origin):
            if place is not None and place[0] == source:
                places.setdefault(place[1], []).append((place[2], rank, row))
    return {token: sorted(slots) for token, slots in places.items()}


def _combine_token(
    rows: Sequence[torch.Tensor], places: list[tuple[int, int, int]], scores: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    dtype = rows[0].dtype
    total = torch.zeros(rows[0].shape[1], dtype=torch.float32, device=rows[0].device)
    if reduction == "exact":
        return _add_slots(total, rows, places, scores).to(dtype)
    for rank in range(len(rows)):
        here = [place for place in places if place[1] == rank]
        if here:
            total = total + _add_slots(torch.zeros_like(total), rows, here, scores).to(dtype).float()
    return total.to(dtype)


def _add_slots(
    acc: torch.Tensor, rows: Sequence[torch.Tensor], places: list[tuple[int, int, int]], scores: torch.Tensor | None
) -> torch.Tensor:
    for slot, rank, row in places:
        term = rows[rank][row].detach().float()
        acc = acc + (term if scores is None else scores[slot].detach().float() * term)
    return acc


def combine_backward(
    grad_out: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[ReferenceRows],
    topk_scores: Sequence[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of combine: of its rows (by expert rank), and of the scores (float64 dot products, by source rank)."""
    grad_rows = [torch.zeros_like(part) for part in rows]
    grad_scores = [torch.zeros_like(scores, dtype=torch.float64) for scores in topk_scores or []]
    for rank, there in enumerate(dispatched):
        for row, place in enumerate(there.origin):
            if place is None:
                continue
            source, token, slot = place
            grad = grad_out[source][token].detach()
            if topk_scores is None:
                grad_rows[rank][row] = grad
                continue
            grad_rows[rank][row] = (grad.float() * topk_scores[source][token, slot].detach().float()).to(grad.dtype)
            grad_scores[source][token, slot] = torch.dot(grad.double(), rows[rank][row].detach().double())
    return grad_rows, grad_scores
