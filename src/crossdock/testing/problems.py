"""A problem: what every rank of a group brings to a dispatch and its combine, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..nn import GroupedExperts
from ..row_capacity import resolve_num_rows, tokens_of_call
from ..types import DispatcherConfig

ExpertKind = Literal["identity", "linear", "swiglu"]
SWIGLU_WIDTH = 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The inputs of all ranks, by rank, on the CPU.

    Attributes:
        config: of the dispatcher.
        x: `[T, hidden_dim]` of the config's dtype.
        topk_scores: `[T, top_k]` float32; NaN where there is no expert, since nothing may read it.
        topk_expert_ids: `[T, top_k]` int64.
        grad_out: `[T, hidden_dim]`: the gradient that arrives at combine's output.
        experts: what runs on the rows.
        apply_scores: whether combine applies the scores; otherwise the experts do.
        strided: hand the inputs over non-contiguous, the ids as int32, with `num_tokens_per_rank` and the histogram.
        ordered_rows: whether rows must come in the contract's order; else each expert's may come in any.

    """

    config: DispatcherConfig
    x: tuple[Tensor, ...]
    topk_scores: tuple[Tensor, ...]
    topk_expert_ids: tuple[Tensor, ...]
    grad_out: tuple[Tensor, ...]
    experts: ExpertKind = "linear"
    apply_scores: bool = True
    strided: bool = False
    ordered_rows: bool = True

    @classmethod
    def draw(cls, config: DispatcherConfig, ids: Sequence[Tensor], generator: torch.Generator) -> Problem:
        """Draw rows, gradients and scores, some of them exactly 0, for given ids."""

        def rows(num_tokens: int) -> Tensor:
            return torch.randn(num_tokens, config.hidden_dim, generator=generator).to(config.dtype)

        scores = []
        for part in ids:
            drawn = torch.rand(part.shape, generator=generator) * 2 - 1
            drawn[torch.rand(part.shape, generator=generator) < 0.1] = 0.0
            scores.append(drawn.masked_fill(part < 0, float("nan")))
        return cls(
            config=config,
            x=tuple(rows(len(part)) for part in ids),
            topk_scores=tuple(scores),
            topk_expert_ids=tuple(ids),
            grad_out=tuple(rows(len(part)) for part in ids),
        )

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def redrawn(self, ids: Sequence[Tensor], seed: int) -> Problem:
        """Other rows, gradients and scores for these ids; all else is the same."""
        drawn = Problem.draw(self.config, ids, torch.Generator().manual_seed(seed))
        parts = ("x", "topk_scores", "topk_expert_ids", "grad_out")
        return self.replace(**{name: getattr(drawn, name) for name in parts})

    def concatenated(self) -> Problem:
        """The same tokens, all on one rank."""
        joined: dict[str, Any] = {
            name: (torch.cat(getattr(self, name)),) for name in ("x", "topk_scores", "topk_expert_ids", "grad_out")
        }
        tokens = max(sum(self.num_tokens), 1)
        return self.replace(**joined, config=dataclasses.replace(self.config, num_max_tokens_per_rank=tokens))

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return len(self.x)

    @property
    def num_tokens(self) -> list[int]:
        """T by rank."""
        return [len(part) for part in self.x]

    @property
    def num_rows(self) -> int | None:
        """Rows that every rank's dispatch returns; None for as many as arrive."""
        if self.config.row_capacity.kind == "exact":
            return None
        bound = max(self.num_tokens) if self.strided else -1
        return int(resolve_num_rows(self.config, self.ep_size, tokens_of_call(self.config, self.num_tokens[0], bound)))

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""
        return self.config.num_experts // self.ep_size


class Experts(nn.Module):
    """The local experts of one rank, with the same weights in every run and for every group size."""

    def __init__(self, problem: Problem, rank: int, device: torch.device) -> None:
        super().__init__()
        self.kind, num_local = problem.experts, problem.num_local_experts
        self.first_expert_id = rank * num_local
        self.swiglu: nn.Module | None = None
        if self.kind == "swiglu":
            self.swiglu = GroupedExperts(
                num_local,
                problem.config.hidden_dim,
                SWIGLU_WIDTH,
                dtype=problem.config.dtype,
                device=device,
                seed=3,
                first_expert_id=self.first_expert_id,
            )

    def forward(self, rows: Tensor, expert_offsets: Tensor, scores: Tensor | None) -> Tensor:
        """Run all experts on rows `[R, hidden_dim]`; `scores [R]` where they are applied inside."""
        if self.swiglu is not None:
            out: Tensor = self.swiglu(rows, expert_offsets, scores)
            return out
        if self.kind == "linear":
            row = torch.arange(rows.shape[0], dtype=expert_offsets.dtype, device=rows.device)
            expert = torch.searchsorted(expert_offsets, row, right=True) + self.first_expert_id
            rows = rows * (expert + 1).to(rows.dtype).unsqueeze(1)
        return rows if scores is None else (rows.float() * scores.unsqueeze(1)).to(rows.dtype)
