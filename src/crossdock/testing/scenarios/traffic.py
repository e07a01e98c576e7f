"""What crosses the wire, as the backend counts it."""

from __future__ import annotations

import torch

from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import send
from ..workloads import NotOffered

_TIMES = {"once": 1, "twice": 2}  # dispatches of a layer


def once_a_rank(seat: Seat) -> None:
    """A token that several experts of a rank want is sent there once."""
    problem = seat.problem("K above local experts")
    with seat.open(problem.config) as dispatcher, torch.no_grad():
        for layer, times in _TIMES.items():
            for _ in range(times):
                send(dispatcher.layer(layer), problem, seat.rank, seat.device)
        stats = dispatcher.stats()
    if not stats.sent_bytes:
        raise NotOffered("deduplicates: the backend counts no bytes")
    wanted = _rows_away(problem, seat.rank) * problem.config.hidden_dim * problem.config.dtype.itemsize
    for layer, times in _TIMES.items():
        told = stats.layers[layer].sent_rows_bytes
        assert told == times * wanted, f"{told} bytes of rows were sent, and once for each rank are {times * wanted}"
    total = sum(_TIMES.values()) * wanted
    assert stats.sent_rows_bytes == total, (
        f"{stats.sent_rows_bytes} bytes of rows were sent by layers that sent {total}"
    )


def _rows_away(problem: Problem, rank: int) -> int:
    """Rows that a rank's tokens send to other ranks: one for every pair of a token and a rank that it names."""
    ids = problem.topk_expert_ids[rank]
    homes = torch.where(ids >= 0, ids // problem.num_local_experts, rank)
    return sum(len({*named} - {rank}) for named in homes.tolist())


SCENARIOS = (
    Scenario(
        "traffic",
        "a token crosses the wire once for each rank that wants it",
        once_a_rank,
        min_ranks=2,
        needs=(("deduplicates", True),),
    ),
)
