"""One training step: dense gradients summed in rank order, experts' gradients already whole on their rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import Transformer
from .parallel import SequenceSharding, gathered, summed_in_rank_order

_MAX_NORM = 1.0


@dataclass(frozen=True, eq=False)
class StepResult:
    """What all ranks agree on after a step.

    Attributes:
        loss: float32, nats per byte over all ranks' tokens.
        gradient_norm: float32, over all parameters of the model, before clipping.
        tokens_per_expert: `[num_layers, num_experts]` int64, of all ranks.
    """

    loss: Tensor
    gradient_norm: Tensor
    tokens_per_expert: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of this rank and the bytes that follow them, `[B, s]` int64 each.

    Attributes:
        inputs: tokens.
        targets: what follows each.
        num_tokens: tokens of all ranks together, which the loss is the mean over.
        sharding: how a sequence is shared; None: it is not.
    """

    inputs: Tensor
    targets: Tensor
    num_tokens: int
    sharding: SequenceSharding | None = None


def loss_of_rank(logits: Tensor, batch: Batch) -> Tensor:
    """The share of this rank in the mean loss: all ranks' shares add up to it."""
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / batch.num_tokens
    )


def training_step(
    model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch, num_tokens_per_rank: int | None = None
) -> StepResult:
    """Forward, backward, one optimiser step and one move of the routers' biases; every rank takes part."""
    output = model(batch.inputs, batch.sharding, num_tokens_per_rank)
    loss = loss_of_rank(output.logits, batch)
    optimizer.zero_grad()
    loss.backward()
    sum_dense_gradients(model)
    norm = gradient_norm(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= (_MAX_NORM / norm).clamp(max=1.0)
    optimizer.step()
    dist.all_reduce(output.tokens_per_expert)  # integers: any order gives the same
    model.balance(output.tokens_per_expert)
    return StepResult(summed_in_rank_order(loss.detach()), norm, output.tokens_per_expert)


def sum_dense_gradients(model: Transformer, group: Any = None) -> None:
    """Give every copy of the dense parameters the sum of all ranks' gradients."""
    grads = [_grad(parameter) for parameter in model.dense_parameters()]
    total = summed_in_rank_order(torch.cat([grad.flatten() for grad in grads]), group)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def gradient_norm(model: Transformer) -> Tensor:
    """The norm over the whole model; experts enter one by one in the order of their ids."""
    dense = torch.stack([_grad(parameter).square().sum() for parameter in model.dense_parameters()]).sum()
    experts = torch.stack([_grad(parameter).square().sum((1, 2)) for parameter in model.expert_parameters()])
    return (dense + torch.cat(gathered(experts), dim=1).sum()).sqrt()


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad
