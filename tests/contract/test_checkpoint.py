"""Activation checkpointing without `crossdock.recompute`: a recomputed dispatch is a call of its own, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import crossdock as cd
from crossdock.nn import GroupedExperts, MoE
from crossdock.routing import softmax_topk
from crossdock.testing import assert_bit_equal
from tests.conftest import Ranks

NUM_EXPERTS, HIDDEN_DIM = 4, 16
LENGTHS = ((7, 3), (0, 5), (6, 0))  # tokens of both ranks in each micro-batch


def _layers(dispatcher: cd.TokenDispatcher) -> torch.nn.ModuleList:
    torch.manual_seed(0)  # the router is the same on every rank
    routers = [torch.nn.Linear(HIDDEN_DIM, NUM_EXPERTS, bias=False) for _ in range(2)]
    num_local = dispatcher.num_local_experts
    first = dispatcher.ep_rank * num_local
    experts = [GroupedExperts(num_local, HIDDEN_DIM, 32, seed=seed, first_expert_id=first) for seed in (1, 2)]
    return torch.nn.ModuleList(
        MoE(dispatcher.layer(f"blocks.{number}"), router, expert, routing=lambda logits: softmax_topk(logits, top_k=2))
        for number, (router, expert) in enumerate(zip(routers, experts, strict=True))
    )


def _gradients(dispatcher: cd.TokenDispatcher, run: Callable[[torch.nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Gradients of x of every micro-batch, then of all weights; backwards run after all forwards."""
    layers = _layers(dispatcher)
    inputs = []
    losses = []
    for step, lengths in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(10 * step + dispatcher.ep_rank)
        x = torch.randn(lengths[dispatcher.ep_rank], HIDDEN_DIM, generator=generator, requires_grad=True)
        h = x
        for layer in layers:
            h = h + run(layer, h)
        inputs.append(x)
        losses.append(h.square().sum())
    for loss in losses:
        loss.backward()
    grads = [value.grad for value in (*inputs, *layers.parameters())]
    return [grad for grad in grads if grad is not None]


def _plain(layer: torch.nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def _checkpointed(use_reentrant: bool) -> Callable[[torch.nn.Module, Tensor], Tensor]:
    def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=use_reentrant)
        return out

    return run


def _compare(rank: int, how: str) -> None:
    config = cd.DispatcherConfig(
        num_experts=NUM_EXPERTS,
        top_k=2,
        hidden_dim=HIDDEN_DIM,
        dtype=torch.float32,
        num_max_tokens_per_rank=16,
        timeout_s=30,
    )
    with cd.TokenDispatcher(config) as dispatcher:
        expected = _gradients(dispatcher, _plain)
        actual = _gradients(dispatcher, _checkpointed(how == "reentrant"))
    assert len(actual) == len(expected)
    for grad, wanted in zip(actual, expected, strict=True):
        assert_bit_equal(grad, wanted, f"gradient under {how} checkpointing")


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_gradients_do_not_change(ranks: Ranks, how: str) -> None:
    ranks(2).run(_compare, how)
