"""Dispatchers over some of the ranks, in any order, and over several groups at once."""

from __future__ import annotations

from contextlib import ExitStack

from ..checks import check_problem, finish
from ..scenario import Scenario
from ..seats import Seat
from ..solving import Attempt, forward

_ROUTING = "0 to K valid ids"


def ranks_in_any_order(seat: Seat) -> None:
    """Groups whose ranks do not ascend, one after the other; the others do not take part."""
    last = seat.size - 1
    orders = [(last,), tuple(reversed(range(seat.size)))]
    if seat.size >= 4:
        orders += [(last, 1), (0, 2), (2, 0, 3)]
    for ranks in orders:
        check_problem(seat, seat.problem(_ROUTING, len(ranks)), ranks)


def several_groups_at_once(seat: Seat) -> None:
    """The world and a part of it, all open together, their calls interleaved differently on different ranks."""
    half = seat.size // 2
    parts = (tuple(range(half)), tuple(range(half, seat.size)))
    groups = [seat.group(part) for part in parts]
    mine = next(group for group in groups if group is not None)
    size = half if seat.rank < half else seat.size - half
    world_problem, part_problem = seat.problem(_ROUTING), seat.problem(_ROUTING, size)
    with ExitStack() as stack:
        world = stack.enter_context(seat.open(world_problem.config))
        part = stack.enter_context(seat.open(part_problem.config, mine))

        def run_part() -> Attempt:
            return forward(part, part_problem, part.ep_rank, seat.device)

        in_world = forward(world, world_problem, seat.rank, seat.device)
        if seat.rank < half:
            in_part = run_part()
            finish(in_world)
            finish(in_part)
        else:
            finish(in_world)
            finish(run_part())
            finish(run_part())


def overlapping_groups(seat: Seat) -> None:
    """Two groups that share rank 0, used alternately."""
    pairs = ((0, 1), (0, 2))
    groups = {pair: seat.group(pair) for pair in pairs}
    problem = seat.problem(_ROUTING, 2)
    with ExitStack() as stack:
        mine = {
            pair: stack.enter_context(seat.open(problem.config, group))
            for pair, group in groups.items()
            if group is not None
        }
        for _ in range(5):
            for dispatcher in mine.values():
                finish(forward(dispatcher, problem, dispatcher.ep_rank, seat.device))


SCENARIOS = (
    Scenario("groups", "groups of some ranks, in any order", ranks_in_any_order, min_ranks=2),
    Scenario("groups", "a group and parts of it at the same time", several_groups_at_once, min_ranks=2),
    Scenario("groups", "groups that overlap in one rank", overlapping_groups, min_ranks=3),
)
