"""A small mixture-of-experts model whose weights depend on its seed alone, for runs in parallel of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossdock as cd
from crossdock import recompute
from crossdock.nn import MoE
from crossdock.routing import softmax_topk
from tests.contract.tails import SpoilingExperts
from tests.contract.trials import make_config

HIDDEN_DIM, NUM_EXPERTS, TOP_K, FFN_DIM = 16, 8, 2, 24
# Lengths that change at every step.
LENGTHS = (71, 47, 97, 60, 76, 46, 44, 72, 41, 47)
MAX_TOKENS = 128


def config_of(capacity: cd.RowCapacity | None = None) -> cd.DispatcherConfig:
    return make_config(
        NUM_EXPERTS,
        TOP_K,
        HIDDEN_DIM,
        num_max_tokens_per_rank=MAX_TOKENS,
        row_capacity=capacity or cd.RowCapacity.exact(),
    )


class Block(nn.Module):
    """A dense part and a mixture of experts, each added to the tokens `[T, D]`. Whoever reads a tail learns NaN."""

    def __init__(self, dispatcher: cd.TokenDispatcher, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.dense = nn.Linear(HIDDEN_DIM, HIDDEN_DIM)
        router = nn.Linear(HIDDEN_DIM, NUM_EXPERTS, bias=False)
        for parameter in (*self.dense.parameters(), *router.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=generator)
        experts = SpoilingExperts(
            dispatcher.num_local_experts,
            HIDDEN_DIM,
            FFN_DIM,
            seed=number,
            first_expert_id=dispatcher.ep_rank * dispatcher.num_local_experts,
        )
        self.moe = MoE(
            dispatcher.layer(f"blocks.{number}.moe"), router, experts, routing=partial(softmax_topk, top_k=TOP_K)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x).tanh()
        out: Tensor = self.moe(x)
        return x + out


class Blocks(nn.Module):
    """Some of a model's blocks, by number; `recomputes` runs each again in backward."""

    def __init__(self, dispatcher: cd.TokenDispatcher, numbers: Sequence[int], *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dispatcher, number) for number in numbers)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = recompute.checkpoint(block, x) if self.recomputes else block(x)
        return x

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for name, parameter in self.named_parameters() if ".experts." not in name)


def batch_of(length: int, *seed: int) -> Tensor:
    """`[length, D]`: the same for the same seeds."""
    whole = sum(number * 1009**place for place, number in enumerate(seed))
    return torch.randn(length, HIDDEN_DIM, generator=torch.Generator().manual_seed(whole))


def squares(out: Tensor, target: Tensor) -> Tensor:
    """A loss: the sum of squared differences, over a number that no run changes."""
    return (out - target).square().sum() / MAX_TOKENS


def sum_in_rank_order(model: Blocks, group: dist.ProcessGroup) -> None:
    """Give every rank of a group the sum of its ranks' dense gradients."""
    for parameter in model.dense_parameters():
        assert parameter.grad is not None
        parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, parameter.grad, group)
        total, *others = parts
        for part in others:
            total += part
        parameter.grad.copy_(total)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


CAPACITIES = (cd.RowCapacity.exact(), cd.RowCapacity.worst_case(), cd.RowCapacity.calibrated(3.0))
