"""Hugging Face's own token exchange, driven as `transformers` drives it.

`EpDispatchExpertsParallel.install_forward` replaces the forward of an experts module, as `from_pretrained` with
`DistributedConfig(ep_size=..., ep_implementation="all_to_all")` does; everything between the router and the layer's
output is theirs, autograd included. Scores come in the model's dtype, as the router of their Qwen3 MoE gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BackendUnavailable
from .checks import check_within_baseline
from .exchanges import Exchange
from .workloads import Inputs, Moved, Workload


@dataclass(frozen=True)
class TransformersAllToAll:
    """`transformers.distributed.expert_parallel.AllToAllEP` (transformers 5.24 or newer)."""

    name: str = "transformers AllToAllEP"

    def open(self, workload: Workload) -> Exchange:
        """Install it over the default group."""
        return _TransformersExchange(workload)

    def check(self, workload: Workload, moved: Sequence[Moved]) -> None:
        """Compare with float64 by the baseline rule; AssertionError."""
        check_within_baseline(workload, moved)


class _IdentityExperts(torch.nn.Module):
    """Experts that return their rows; they get one local expert and a weight of 1 for each row, and need neither."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts  # of this rank: what `install_forward` reads

    def forward(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows


class _TransformersExchange(Exchange):
    def __init__(self, workload: Workload) -> None:
        try:
            from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
        except ImportError as error:
            fix = "pip install 'transformers>=5.24' accelerate"
            raise BackendUnavailable("transformers AllToAllEP", str(error), fix) from error
        self.scores_dtype = workload.dtype
        num_ranks = dist.get_world_size()
        # Ranks hold different batches: expert parallel over all of them, no tensor parallelism.
        mesh = dist.init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("ep", "tp"))
        experts = _IdentityExperts(workload.num_experts // num_ranks)
        parallel: Any = EpDispatchExpertsParallel()
        parallel.install_forward(experts, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation="all_to_all")
        self._experts = experts

    def forward(self, x: torch.Tensor, topk_scores: torch.Tensor, topk_expert_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._experts(x, topk_expert_ids, topk_scores)
        return out

    def sent_bytes_of(self, inputs: Inputs) -> int:
        counted = CountSentBytes(dist.get_rank())
        with counted:
            self.step(inputs)
        return counted.sent_bytes


# operator -> which of its arguments are what is sent, and how many rows of it go to each rank (empty: equally many)
_SENT_AND_SPLITS = {"_c10d_functional::all_to_all_single": (0, 2), "c10d::alltoall_base_": (1, 4)}


class CountSentBytes(TorchDispatchMode):
    """Counts what enters the all-to-all collectives of torch for other ranks than `rank`, in backward too."""

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes = 0
        self._rank = rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = _SENT_AND_SPLITS.get(func.name())
        if place is not None:
            self.sent_bytes += self._leaving(args[place[0]], list(args[place[1]]))
        return func(*args, **(kwargs or {}))

    def _leaving(self, sent: torch.Tensor, splits: list[int]) -> int:
        num_rows: int = sent.shape[0]
        num_own = splits[self._rank] if splits else num_rows // dist.get_world_size()
        row_bytes: int = math.prod(sent.shape[1:]) * sent.element_size()
        return (num_rows - num_own) * row_bytes
