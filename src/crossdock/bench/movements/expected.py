"""What must come out of a problem's operations, in plain torch on the problem's device.

A test holds it against `crossdock.reference`. Experts multiply their rows by powers of two, so what a rank gets back
can be told from its own tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...permute import count_by_expert, map_slots
from ...types import Reduction
from .moved import expert_scale
from .problems import Problem

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The rows of one set that one rank's experts get, in the contract's order: by expert, rank, token, slot.

    Attributes:
        slot_of_row: `[R]` int64, flat over all ranks' slots: `(rank * num_tokens + token) * top_k + slot`.
        expert_of_row: `[R]` int64 local expert.
        tokens_per_expert: `[num_local_experts]` int64.
        row_scores: `[R]` float32.
    """

    slot_of_row: torch.Tensor
    expert_of_row: torch.Tensor
    tokens_per_expert: torch.Tensor
    row_scores: torch.Tensor

    def reordered(self, order: torch.Tensor) -> Arrivals:
        """With row i taken from `order[i]`."""
        return Arrivals(
            self.slot_of_row[order], self.expert_of_row[order], self.tokens_per_expert, self.row_scores[order]
        )


def arrivals(problem: Problem, number: int) -> Arrivals:
    """What reaches this rank in a set."""
    scores, ids = (part.to(problem.device) for part in problem.choices[number])
    num_local = problem.num_local_experts
    local = ids.flatten(0, 1) - problem.rank * num_local
    local = torch.where((local >= 0) & (local < num_local), local, -1)
    counts = count_by_expert(local, num_local)
    num_rows = int(counts.sum())
    slot_of_row = map_slots(local, counts, 1, num_rows, num_rows).slot_of_row
    return Arrivals(slot_of_row, local.flatten()[slot_of_row], counts, scores.flatten()[slot_of_row])


def rows_by_slot(problem: Problem, number: int, slots: torch.Tensor, *, grads: bool = False) -> torch.Tensor:
    """The rows of tokens (or of their `grad_out`) that flat slots `[N]` belong to, any rank's: `[N, hidden_dim]`."""
    token = slots // problem.workload.top_k
    of_rank = problem.grads_of if grads else problem.rows_of
    everyone = torch.cat([of_rank(rank, number) for rank in range(problem.ep_size)])
    return everyone[token]


def home(problem: Problem, number: int, reduction: Reduction, *, weighted: bool, scaled: bool = True) -> torch.Tensor:
    """Tokens of this rank after experts and combine: `[num_tokens, hidden_dim]`, to the bit of the contract.

    Weighted by the scores as combine does it, or not, as backward of dispatch does it; `scaled` by the experts, or not.
    """
    x, scores, ids, _ = problem.sets[number]
    scale = expert_scale(problem.workload.num_experts, problem.device) ** scaled
    step = max(1, _CHUNK_ELEMENTS // x.shape[1])
    parts = [
        _home_of_tokens(part, scale[some], weights if weighted else None, some // problem.num_local_experts, reduction)
        for part, weights, some in zip(x.split(step), scores.split(step), ids.split(step), strict=True)
    ]
    return torch.cat(parts)


def _home_of_tokens(
    x: torch.Tensor,
    scale: torch.Tensor,
    weights: torch.Tensor | None,
    owner: torch.Tensor,
    reduction: Reduction,
) -> torch.Tensor:
    """Add up tokens `[n, D]`; `scale`, `weights` and the owning rank of each slot are `[n, top_k]`."""
    if reduction == "exact":
        return _add_slots(x, scale, weights, torch.ones_like(owner, dtype=torch.bool)).to(x.dtype)
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(int(owner.max()) + 1):
        here = owner == rank
        partial = _add_slots(x, scale, weights, here).to(x.dtype).float()
        total = torch.where(here.any(1, keepdim=True), total + partial, total)
    return total.to(x.dtype)


def _add_slots(x: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor | None, here: torch.Tensor) -> torch.Tensor:
    """Products and sums are rounded one after the other, slot by slot: `[n, D]` float32."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(scale.shape[1]):
        term = (x * scale[:, slot : slot + 1].to(x.dtype)).float()
        if weights is not None:
            term = weights[:, slot : slot + 1] * term
        total = torch.where(here[:, slot : slot + 1], total + term, total)
    return total


def score_gradients(problem: Problem, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """True score gradients of combine and how far float32 may be off: `[num_tokens, top_k]` float64 each.

    The bound is that of a float32 dot of `hidden_dim` products in any order.
    """
    x, _, ids, grad = problem.sets[number]
    scale = expert_scale(problem.workload.num_experts, problem.device)[ids].double()
    step = max(1, _CHUNK_ELEMENTS // x.shape[1])
    dots, sizes = [], []
    for part, grads in zip(x.split(step), grad.split(step), strict=True):
        products = part.double() * grads.double()
        dots.append(products.sum(1, keepdim=True))
        sizes.append(products.abs().sum(1, keepdim=True))
    lost = x.shape[1] * 2.0**-24
    return torch.cat(dots) * scale, torch.cat(sizes) * scale * lost / (1 - lost)
