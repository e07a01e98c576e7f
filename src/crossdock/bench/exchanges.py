"""Who is measured: a way of bringing tokens to the experts' ranks and back, opened on every rank for one workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import DispatcherConfig, TokenDispatcher
from ..types import Reduction
from .checks import check_to_the_bit
from .workloads import Inputs, Moved, Workload


class Exchange(ABC):
    """An opened exchange. Every method is called by all ranks or by none."""

    scores_dtype: torch.dtype = torch.float32

    @abstractmethod
    def forward(self, x: torch.Tensor, topk_scores: torch.Tensor, topk_expert_ids: torch.Tensor) -> torch.Tensor:
        """Dispatch, identity experts, weighted combine: `[num_tokens, hidden_dim]`, differentiable."""

    @abstractmethod
    def sent_bytes_of(self, inputs: Inputs) -> int:
        """Bytes this rank sends to other ranks in one `step`, measured by making one."""

    def prepare(self, inputs: Inputs) -> Inputs:
        """The inputs as this exchange's own router would give them; not part of a measurement."""
        return inputs._replace(topk_scores=inputs.topk_scores.to(self.scores_dtype))

    def step(self, inputs: Inputs) -> Moved:
        """One forward and backward of prepared inputs."""
        x = inputs.x.detach().requires_grad_()
        scores = inputs.topk_scores.detach().requires_grad_()
        out = self.forward(x, scores, inputs.topk_expert_ids)
        out.backward(inputs.grad_out)
        assert x.grad is not None and scores.grad is not None
        return Moved(out.detach(), x.grad, scores.grad)

    def close(self) -> None:
        """Free what was opened."""


@dataclass(frozen=True)
class Crossdock:
    """Our own dispatcher, through one of its backends."""

    backend: str
    reduction: Reduction = "fast"

    @property
    def name(self) -> str:
        """As it stands in results."""
        return f"crossdock {self.backend}, {self.reduction}"

    def open(self, workload: Workload) -> Exchange:
        """Open a dispatcher over the default group."""
        return _CrossdockExchange(self, workload)

    def check(self, workload: Workload, moved: Sequence[Moved]) -> None:
        """Compare with the contract, to the bit; AssertionError."""
        check_to_the_bit(workload, self.reduction, moved)


class _CrossdockExchange(Exchange):
    def __init__(self, contestant: Crossdock, workload: Workload) -> None:
        config = DispatcherConfig(
            num_experts=workload.num_experts,
            top_k=workload.top_k,
            hidden_dim=workload.hidden_dim,
            dtype=workload.dtype,
            num_max_tokens_per_rank=workload.num_tokens,
            reduction=contestant.reduction,
        )
        self._dispatcher = TokenDispatcher(config, backend=contestant.backend)

    def forward(self, x: torch.Tensor, topk_scores: torch.Tensor, topk_expert_ids: torch.Tensor) -> torch.Tensor:
        routed = self._dispatcher.dispatch(x, topk_scores, topk_expert_ids)
        return self._dispatcher.combine(routed.rows, routed.handle)

    def sent_bytes_of(self, inputs: Inputs) -> int:
        before = self._dispatcher.stats().sent_bytes
        self.step(inputs)
        return self._dispatcher.stats().sent_bytes - before

    def close(self) -> None:
        self._dispatcher.close()
