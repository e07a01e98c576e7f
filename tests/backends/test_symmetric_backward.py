"""Backward of a dispatch over shared memory: rows and scalars home in one round give what two rounds give."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.backends.base import Call, Received, Transport
from crossdock.backends.symmetric.transport import SymmetricTransport
from crossdock.kernels.signal import INBOX, ROUND
from crossdock.testing import assert_bit_equal
from crossdock.types import RowCapacity
from tests.kernels.test_small import Batch, Team, spec_of

EP_SIZE, BOUND, CAPACITY = 3, 20, 24  # a rank wants more rows than that
NUM_TOKENS = (20, 0, 11)


def team_of(**changes: Any) -> tuple[Team, Batch, list[Received]]:
    """A group that has dispatched a batch, of which some slots were dropped."""
    facts: dict[str, Any] = {
        "top_k": 3,
        "hidden_dim": 16,
        "num_max_tokens_per_rank": BOUND,
        "row_capacity": RowCapacity.rows(CAPACITY),
    }
    team = Team(spec_of(EP_SIZE, **{**facts, **changes}))
    batch = Batch.of(team.ranks[0].spec, NUM_TOKENS)

    def dispatch(rank: SymmetricTransport, call: Call) -> Received:
        own = rank.spec.rank
        return rank.dispatch(batch.x[own], batch.scores[own], batch.ids[own], CAPACITY, call)

    received = team.run(dispatch, "dispatch", BOUND)
    assert any((got.layout[0] == -2).any() for got in received)
    return team, batch, received


def draws_of(received: Sequence[Received], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of rows and of their scores, by rank."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(got.rows.shape, generator=draw).to(got.rows.dtype), torch.randn(len(got.rows), generator=draw))
        for got in received
    ]


def moved(team: Team) -> list[tuple[int, int, int, int]]:
    """Rounds, those of small batches, bytes of rows, and others, by rank."""
    states = [(rank.rounds.board.state, rank.sent()) for rank in team.ranks]
    return [
        (int(state[ROUND]), int(state[INBOX]), int(sent.rows_bytes.sum()), sent.other_bytes) for state, sent in states
    ]


@pytest.mark.parametrize(
    ("changes", "rounds", "rounds_apart"),
    [
        ({}, (1, 1), (2, 1)),
        ({"row_capacity": RowCapacity.exact(), "dtype": torch.bfloat16}, (1, 0), (2, 0)),
        ({"reduction": "exact", "dtype": torch.bfloat16}, (4, 0), (4, 0)),
    ],
    ids=["small", "general", "exact"],
)
def test_one_round_gives_the_bits_and_counts_the_bytes_of_two(changes, rounds, rounds_apart):
    team, _, received = team_of(**changes)
    draws = draws_of(received, 1)

    def both(rank: SymmetricTransport, call: Call, *, apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
        own = rank.spec.rank
        backward = Transport.dispatch_backward if apart else type(rank).dispatch_backward
        return backward(rank, *draws[own], received[own].layout, call)

    found, steps = {}, {}
    for apart in (False, True):
        before = moved(team)
        found[apart] = team.run(partial(both, apart=apart), "dispatch_backward")
        pairs = zip(before, moved(team), strict=True)
        steps[apart] = [[now - then for then, now in zip(*pair, strict=True)] for pair in pairs]
    for together, after_another in zip(found[False], found[True], strict=True):
        for one, other, name in zip(together, after_another, ("dx", "scalars"), strict=True):
            assert_bit_equal(one, other, name)
    for apart, wanted in ((False, rounds), (True, rounds_apart)):
        assert [(step[0], step[1]) for step in steps[apart]] == [wanted] * EP_SIZE
    assert [step[2:] for step in steps[False]] == [step[2:] for step in steps[True]]
    scalars = [(EP_SIZE - 1) * 4 * 3 * tokens for tokens in NUM_TOKENS]
    assert [step[3] for step in steps[False]] == scalars
    team.close()


_KINDS = ("rows and scalars", "scalars", "rows home", "rows out", "dispatch")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_rounds_in_any_order_with_ranks_that_fall_behind(seed: int):
    """Whatever comes before and behind it, and however late a rank is, each call brings what it brings alone."""
    draw = random.Random(seed)
    order = [(number, kind, draw.random() < 0.3) for number, kind in enumerate(draw.sample(_KINDS * 3, 15))]
    pauses = [random.Random(10 * seed + rank) for rank in range(EP_SIZE)]
    team, batch, received = team_of()

    def act(which: tuple[int, str, bool], rank: SymmetricTransport, call: Call) -> Sequence[torch.Tensor]:
        number, kind, small = which
        own = rank.spec.rank
        layout, end = received[own].layout, int(received[own].expert_offsets[-1])
        rows, values = draws_of(received, number)[own]
        x = number * batch.x[own]
        rank.plan = rank.plan._replace(small=int(small))
        if kind == "rows and scalars":
            return rank.dispatch_backward(rows, values, layout, call)
        if kind == "scalars":
            return (rank.scalars_home(values, layout, call),)
        if kind == "rows home":
            return (rank.rows_home(rows, None, layout, call),)
        if kind == "rows out":
            return (rank.rows_out(x, layout, call)[:end],)
        return (rank.dispatch(x, batch.scores[own], batch.ids[own], CAPACITY, call).rows[:end],)

    def all_of_them(rank: SymmetricTransport, call: Call) -> list[Sequence[torch.Tensor]]:
        found = []
        for which in order:
            time.sleep(pauses[rank.spec.rank].random() ** 4 * 0.05)
            found.append(act(which, rank, call))
        return found

    found = team.run(all_of_them, "dispatch_backward", BOUND)
    for which in order:
        alone = team.run(partial(act, which), "dispatch_backward", BOUND)
        for own, expected in enumerate(alone):
            for one, other in zip(found[own][which[0]], expected, strict=True):
                assert_bit_equal(one, other, f"{which[1]} of rank {own}")
    team.close()
