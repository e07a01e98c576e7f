"""No interleaving of two ranks with two programs each makes a small batch read what it should not.

A model of `kernels/small.py` and of the general rounds between small ones: what each program does is a list of steps,
and every order in which the four programs can make theirs is tried. Filling and seeing take two steps each, so whoever
may overwrite what another still reads does so in some order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

PROGRAMS, WHOLE, TORN = 2, 8, -1

# One launch: the steps of each of its programs. "blind" is a general round that waits for nobody (no rank has tokens).
_SMALL = ("load", "tear", "fill", "arrive", "await arrived", "see", "see again")
_CLERK = ("load", "tear", "fill", "tell", "arrive", "await arrived", "count", "see", "see again")
_GENERAL = (
    "load",
    "await read",
    "tear staging",
    "fill staging",
    "tell",
    "await told",
    "see staging",
    "see staging",
    "count",
    "read",
)
KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "small": (_CLERK, _SMALL),
    "general": (_GENERAL,),
    "blind": (("load", "await read", "tell", "count", "read"),),
}


class Program(NamedTuple):
    """How far a program is, and what it has read of its rank's state."""

    step: int = 0
    number: int = 0
    small: int = 0


class Rank(NamedTuple):
    """One rank: its programs, its state, and its memory, which the other one writes."""

    launch: int = 0
    programs: tuple[Program, ...] = ()
    number: int = 0
    small: int = 0
    pushed: int = 0
    inbox: tuple[int, ...] = (0,) * (2 * PROGRAMS)
    told: tuple[int, int] = (0, 0)
    arrived: int = 0
    own_arrived: int = 0
    read: int = 0
    staging: int = 0


class Wrong(Exception):
    """What was read, and what should have been."""


class Rules(NamedTuple):
    """What the model leaves out or does otherwise, to see that it is needed."""

    waits: bool = True
    waits_for_itself: bool = True
    halves: int = 2
    own_count: bool = True
    whole_arrivals: bool = True


AS_THEY_ARE = Rules()


def put(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def moved(rules: Rules, kind: str, place: int, own: Rank, peer: Rank) -> tuple[Rank, Rank] | None:
    """Both ranks after the next step of one program of the first, or None where it has to wait."""
    program = own.programs[place]
    what = KINDS[kind][place][program.step]
    number, small = program.number, program.small
    half = (small if rules.own_count else number) % rules.halves
    if what == "load":
        program = program._replace(number=own.number + 1, small=own.small + (kind == "small"))
    elif what == "tear" or what == "fill":
        value = TORN if what == "tear" else number
        peer = peer._replace(inbox=put(peer.inbox, half * PROGRAMS + place, value))
    elif what == "tell":
        first, second = put(peer.told, number % 2, number)
        peer = peer._replace(told=(first, second))
    elif what == "arrive":
        part = (WHOLE - (PROGRAMS - 1) if place == 0 else 1) if rules.whole_arrivals else WHOLE
        peer, own = peer._replace(arrived=peer.arrived + part), own._replace(own_arrived=own.own_arrived + part)
    elif what == "await arrived":
        if rules.waits and own.arrived // WHOLE < small:
            return None
        if rules.waits_for_itself and own.own_arrived // WHOLE < small:
            return None
        if own.told[number % 2] < number:
            raise Wrong(f"round {number} is not told of")
    elif what in ("see", "see again"):
        seen = own.inbox[half * PROGRAMS : (half + 1) * PROGRAMS]
        if seen != (number,) * PROGRAMS:
            raise Wrong(f"the inbox holds {seen}, not what round {number} brings")
    elif what == "await read":
        if own.read < own.pushed:
            return None
    elif what in ("tear staging", "fill staging"):
        peer, own = peer._replace(staging=TORN if what == "tear staging" else number), own._replace(pushed=number)
    elif what == "await told":
        if own.told[number % 2] < number:
            return None
    elif what == "see staging":
        if own.staging != number:
            raise Wrong(f"the staging buffer holds {own.staging}, not round {number}")
    elif what == "count":
        own = own._replace(number=number, small=small)
    else:
        assert what == "read"
        peer = peer._replace(read=number)
    programs = list(own.programs)
    programs[place] = program._replace(step=program.step + 1)
    own = own._replace(programs=tuple(programs))
    return own, peer


def launched(rank: Rank, kinds: Sequence[str]) -> Rank:
    """The rank with its next launch begun, where the one before has ended."""
    done = all(p.step == len(steps) for p, steps in zip(rank.programs, KINDS[kinds[rank.launch - 1]], strict=False))
    if done and rank.launch < len(kinds):
        return rank._replace(launch=rank.launch + 1, programs=(Program(),) * len(KINDS[kinds[rank.launch]]))
    return rank


def followers(rules: Rules, kinds: Sequence[str], ranks: tuple[Rank, Rank]) -> Iterator[tuple[Rank, Rank]]:
    for own in (0, 1):
        kind = kinds[ranks[own].launch - 1]
        for place, program in enumerate(ranks[own].programs):
            if program.step < len(KINDS[kind][place]):
                after = moved(rules, kind, place, ranks[own], ranks[1 - own])
                if after is not None:
                    mine, other = launched(after[0], kinds), after[1]
                    yield (mine, other) if own == 0 else (other, mine)


def explore(kinds: Sequence[str], rules: Rules = AS_THEY_ARE) -> int:
    """How many states two ranks that make these rounds can be in.

    Raises:
        Wrong: in one of them something is read that should not be, or nobody can go on.
    """
    begun = launched(Rank(), kinds)
    seen, todo = {(begun, begun)}, [(begun, begun)]
    while todo:
        ranks = todo.pop()
        after = list(followers(rules, kinds, ranks))
        if not after and any(rank.number < len(kinds) for rank in ranks):
            raise Wrong(f"stuck in rounds {ranks[0].launch} and {ranks[1].launch}")
        todo += [state for state in after if state not in seen]
        seen.update(after)
    return len(seen)


def test_no_interleaving_of_small_and_general_rounds_goes_wrong():
    num_states = sum(explore(kinds) for kinds in itertools.product(KINDS, repeat=3))
    assert num_states > 20_000


@pytest.mark.parametrize("kinds", [("small", "blind", "small"), ("small", "general", "small")], ids="-".join)
def test_longer_rows_of_rounds(kinds: tuple[str, ...]):
    assert explore(("small", *kinds, "small")) > 5_000


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        (Rules(waits=False), ("small",)),
        (Rules(waits_for_itself=False), ("small", "small")),
        (Rules(halves=1), ("small", "small")),
        (Rules(own_count=False), ("small", "blind", "small")),
        (Rules(whole_arrivals=False), ("small",)),
    ],
    ids=["wait", "wait for itself", "halves", "a count of its own", "parts"],
)
def test_every_rule_is_needed(rules: Rules, kinds: tuple[str, ...]):
    with pytest.raises(Wrong, match="inbox|told"):
        explore(kinds, rules)
    explore(kinds)
