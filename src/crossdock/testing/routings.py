"""The routings of the conformance suite by name: those that dispatchers were seen to get wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Draw = Callable[[torch.Generator, "Routing", int, int], torch.Tensor]


@dataclass(frozen=True)
class Routing:
    """Who goes where, in one group size.

    Attributes:
        num_experts: over the group.
        top_k: slots of a token.
        num_tokens: T by rank.
        draw: `(generator, routing, rank, T)` to expert ids `[T, top_k]` int64.
        may_repeat: whether a draw can have a token that names an expert twice.

    """

    num_experts: int
    top_k: int
    num_tokens: tuple[int, ...]
    draw: Draw
    may_repeat: bool = False

    @property
    def ep_size(self) -> int:
        """Size of the group."""
        return len(self.num_tokens)


# -- how ids are drawn ------------------------------------------------------------------------------------------------


def _in_turn(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    slots = torch.arange(num_tokens * routing.top_k) + rank
    return (slots % routing.num_experts).view(num_tokens, routing.top_k)


def _distinct(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    return _weighted(generator, torch.ones(routing.num_experts), routing, num_tokens)


def _skewed(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    return _weighted(generator, 1.0 / (1.0 + torch.arange(routing.num_experts)) ** 2, routing, num_tokens)


def _weighted(generator: torch.Generator, weights: torch.Tensor, routing: Routing, num_tokens: int) -> torch.Tensor:
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int64)
    for token in range(num_tokens):
        ids[token] = torch.multinomial(weights, routing.top_k, generator=generator)
    return ids


def _one_expert(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    return torch.full((num_tokens, routing.top_k), routing.num_experts - 1)


def _first_rank_only(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    return _distinct(generator, routing, rank, num_tokens) % (routing.num_experts // routing.ep_size)


def _some_absent(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    """Token t has `t % (top_k + 1)` valid ids, at any slots."""
    ids = _distinct(generator, routing, rank, num_tokens)
    for token in range(num_tokens):
        absent = torch.randperm(routing.top_k, generator=generator)[token % (routing.top_k + 1) :]
        ids[token, absent] = -1
    return ids


def _all_absent(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    return torch.full((num_tokens, routing.top_k), -1)


def _with_repeats(generator: torch.Generator, routing: Routing, rank: int, num_tokens: int) -> torch.Tensor:
    ids = torch.randint(-1, routing.num_experts, (num_tokens, routing.top_k), generator=generator)
    ids[::2, -1] = ids[::2, 0]
    return ids


# -- the routings by name ---------------------------------------------------------------------------------------------


def _uneven(ep_size: int) -> tuple[int, ...]:
    return tuple(itertools.islice(itertools.cycle((13, 7, 1, 10)), ep_size))


def _every_other_empty(ep_size: int) -> tuple[int, ...]:
    return tuple(itertools.islice(itertools.cycle((0, 7, 0, 5)), ep_size))


def routing_table(ep: int) -> dict[str, Routing]:
    """Return every routing of a group of `ep` ranks."""
    return {
        "balanced": Routing(4 * ep, 2, (8,) * ep, _in_turn),
        "skewed": Routing(4 * ep, 3, (9,) * ep, _skewed),
        "one hot expert": Routing(2 * ep, 1, (8,) * ep, _one_expert),
        "ranks without tokens": Routing(4 * ep, 2, _every_other_empty(ep), _distinct),
        "ranks that receive nothing": Routing(3 * ep, 2, (6,) * ep, _first_rank_only, may_repeat=ep > 1),
        "0 to K valid ids": Routing(4 * ep, 4, (10,) * ep, _some_absent),
        "no valid id": Routing(2 * ep, 2, (4,) * ep, _all_absent),
        "duplicates": Routing(3 * ep, 3, (7,) * ep, _with_repeats, may_repeat=True),
        "uneven token counts": Routing(5 * ep, 3, _uneven(ep), _distinct),
        "K above local experts": Routing(2 * ep, min(5, 2 * ep), (6,) * ep, _distinct),
        "one expert a rank": Routing(ep, min(2, ep), _uneven(ep), _distinct),
    }


ROUTINGS = tuple(routing_table(1))
