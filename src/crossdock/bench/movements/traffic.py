"""Which bytes an operation has to move between ranks and inside them, and the time that no implementation can undercut.

Rows alone are counted: ids, scores and counts are less than a hundredth of them in all but the smallest workloads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from .ceilings import Ceilings
from .problems import Problem

Direction = Literal["out", "home"]
Count = Literal["once", "copies"]


@dataclass(frozen=True)
class RankBytes:
    """Row bytes of one operation on one rank.

    Attributes:
        sent: to other ranks.
        received: from other ranks.
        local: read and written in its own memory besides: the rows of its tokens and those of its experts.
    """

    sent: float
    received: float
    local: float

    def floor_us(self, ceilings: Ceilings) -> float:
        """The longest of the three, each at its ceiling, in microseconds."""
        local_us = self.local / ceilings.copy_gb_per_s / 1e3
        if ceilings.put_gb_per_s is None or ceilings.get_gb_per_s is None:
            return local_us
        return max(local_us, self.sent / ceilings.put_gb_per_s / 1e3, self.received / ceilings.get_gb_per_s / 1e3)


@dataclass(frozen=True)
class Traffic:
    """Row bytes by rank, by both counts.

    Attributes:
        once: a token crosses the wire once for each rank that wants it.
        copies: it crosses once for each expert that wants it.
    """

    once: tuple[RankBytes, ...]
    copies: tuple[RankBytes, ...]

    def by(self, count: Count) -> tuple[RankBytes, ...]:
        """Bytes by rank, by one of the counts."""
        return self.once if count == "once" else self.copies

    def busiest(self, count: Count) -> float:
        """Remote bytes of the rank and direction that has most."""
        return max(max(rank.sent, rank.received) for rank in self.by(count))

    def floor_us(self, ceilings: Ceilings, *, must: Count = "once") -> float:
        """The floor of the slowest rank; `must` is the count that the operation cannot do with less than."""
        return max(rank.floor_us(ceilings) for rank in self.by(must))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def traffic_of(problem: Problem, direction: Direction) -> Traffic:
    """Bytes of one operation, the mean of the sets: rows `out` to the experts, or `home` from them.

    `out` reads the tokens' rows and writes the experts' rows; `home` reads the latter and writes the former.
    """
    ep_size, row_bytes = problem.ep_size, problem.workload.row_bytes
    slots = torch.stack([_slots_between(choice.topk_expert_ids, problem) for choice in problem.choices])  # [S, P, T, P]
    copies = slots.sum(2).double().mean(0) * row_bytes  # [from, to]
    once = (slots > 0).sum(2).double().mean(0) * row_bytes
    local = [problem.workload.num_tokens * row_bytes + float(copies[:, rank].sum()) for rank in range(ep_size)]
    return Traffic(_by_rank(once, local, direction), _by_rank(copies, local, direction))


def _slots_between(ids: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Slots of each rank's tokens that each rank's experts serve: `[ep_size, T, ep_size]`, from `[ep_size, T, K]`."""
    owner = ids // problem.num_local_experts
    counts = torch.zeros(*ids.shape[:2], problem.ep_size, dtype=torch.int64)
    return counts.scatter_add_(2, owner, torch.ones_like(owner))


def _by_rank(between: torch.Tensor, local: list[float], direction: Direction) -> tuple[RankBytes, ...]:
    remote = between - torch.diag(between.diagonal())
    sent, received = remote.sum(1).tolist(), remote.sum(0).tolist()
    if direction == "home":
        sent, received = received, sent
    return tuple(RankBytes(*bytes_of) for bytes_of in zip(sent, received, local, strict=True))
