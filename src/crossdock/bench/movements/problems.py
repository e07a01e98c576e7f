"""The tensors of a workload on every rank: random data and random routing, in several sets that take turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from .workloads import Workload, draw_expert_ids

# Sets are as many as it takes for their rows to exceed any GPU's cache, within limits.
_CACHE_BYTES = 128 << 20
_MIN_SETS, _MAX_SETS = 2, 8
_SEED = 20_011


class Inputs(NamedTuple):
    """One rank's part of one set.

    Attributes:
        x: `[num_tokens, hidden_dim]` of the workload's dtype.
        topk_scores: `[num_tokens, top_k]` float32, positive, a token's sum is 1.
        topk_expert_ids: `[num_tokens, top_k]` int64.
        grad_out: `[num_tokens, hidden_dim]`, the gradient that backward starts from.
    """

    x: torch.Tensor
    topk_scores: torch.Tensor
    topk_expert_ids: torch.Tensor
    grad_out: torch.Tensor


class Choices(NamedTuple):
    """What the routers of all ranks decided in one set, on the CPU: both `[ep_size, num_tokens, top_k]`."""

    topk_scores: torch.Tensor
    topk_expert_ids: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """A workload on one rank of a group; any rank can make the part of any other.

    Attributes:
        workload: its sizes.
        rank: this one.
        ep_size: ranks of the group.
        device: where the tensors are; on all ranks of the same kind, as their random numbers depend on it.
    """

    workload: Workload
    rank: int
    ep_size: int
    device: torch.device

    @property
    def num_local_experts(self) -> int:
        """Experts of a rank."""
        return self.workload.num_experts // self.ep_size

    @property
    def num_sets(self) -> int:
        """How many sets take turns."""
        if self.device.type == "cpu":
            return _MIN_SETS
        needed = -(-_CACHE_BYTES // (self.workload.num_tokens * self.workload.row_bytes))
        return min(max(needed, _MIN_SETS), _MAX_SETS)

    @cached_property
    def choices(self) -> tuple[Choices, ...]:
        """The routing of all ranks, by set."""
        return tuple(_choices(self.workload, self.ep_size, number) for number in range(self.num_sets))

    @cached_property
    def sets(self) -> tuple[Inputs, ...]:
        """The tensors of this rank, by set."""
        return tuple(self._inputs(number) for number in range(self.num_sets))

    @cached_property
    def num_rows_needed(self) -> int:
        """The most rows that reach any rank in any set."""
        owners = [choice.topk_expert_ids.flatten() // self.num_local_experts for choice in self.choices]
        return max(int(torch.bincount(owner, minlength=self.ep_size).max()) for owner in owners)

    def rows_of(self, rank: int, number: int) -> torch.Tensor:
        """`x` of any rank in a set: `[num_tokens, hidden_dim]`."""
        return self._normal(rank, number, "x")

    def grads_of(self, rank: int, number: int) -> torch.Tensor:
        """`grad_out` of any rank in a set: `[num_tokens, hidden_dim]`."""
        return self._normal(rank, number, "grad")

    def _inputs(self, number: int) -> Inputs:
        scores, ids = (part[self.rank].to(self.device) for part in self.choices[number])
        return Inputs(self.rows_of(self.rank, number), scores, ids, self.grads_of(self.rank, number))

    def _normal(self, rank: int, number: int, what: str) -> torch.Tensor:
        size = (self.workload.num_tokens, self.workload.hidden_dim)
        draw = _generator(rank, number, what, self.device)
        return torch.randn(size, generator=draw, device=self.device).to(self.workload.dtype)


@lru_cache(maxsize=16)
def _choices(workload: Workload, ep_size: int, number: int) -> Choices:
    draws = [_generator(rank, number, "routing", torch.device("cpu")) for rank in range(ep_size)]
    ids = torch.stack([draw_expert_ids(workload, ep_size, draw) for draw in draws])
    logits = [torch.randn(ids.shape[1:], generator=draw) for draw in draws]
    return Choices(torch.stack(logits).softmax(2), ids)


def _generator(rank: int, number: int, what: str, device: torch.device) -> torch.Generator:
    part = ("routing", "x", "grad").index(what)
    return torch.Generator(device).manual_seed(((_SEED + number) * 4099 + rank) * 3 + part)
