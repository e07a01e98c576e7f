"""The model of the training-step benchmark: blocks of attention and a mixture of experts, between fixed tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from .. import Dispatched, DispatchHandle, TokenDispatcher
from ..nn import GroupedExperts, MoE
from ..routing import Routing, softmax_topk, static_balanced
from ..types import DispatchLayer

RoutingKind = Literal["dynamic", "static"]
_HEAD_DIM = 128  # at most


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of the model and of its batch, the same number of tokens on every rank.

    Attributes:
        num_layers: blocks.
        hidden_dim: elements of a token.
        num_experts: experts of a layer, over all ranks.
        top_k: experts of a token.
        ffn_dim: elements of an expert's inner row.
        num_tokens: tokens of a rank, one sequence.
        dtype: of all weights and rows, by name.
    """

    num_layers: int = 4
    hidden_dim: int = 2048
    num_experts: int = 64
    top_k: int = 8
    ffn_dim: int = 1408
    num_tokens: int = 2048
    dtype: str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        layers = "1 layer" if self.num_layers == 1 else f"{self.num_layers} layers"
        return (
            f"{layers} of {self.hidden_dim} x {self.num_experts} experts, top-{self.top_k}, expert"
            f" width {self.ffn_dim}, {self.num_tokens} tokens a rank, {self.dtype}"
        )


SIZES = {
    "cuda": StepSizes(),
    "cpu": StepSizes(hidden_dim=64, num_experts=8, top_k=2, ffn_dim=64, num_tokens=128, dtype="float32"),
}


class TimedLayer:
    """A layer of a dispatcher that notes how long the host is busy with each dispatch, in microseconds."""

    def __init__(self, layer: DispatchLayer) -> None:
        self._layer, self.dispatch_us = layer, list[float]()

    def dispatch(
        self,
        x: Tensor,
        topk_scores: Tensor,
        topk_expert_ids: Tensor,
        num_local_tokens_per_expert: Tensor | None = None,
        *,
        num_tokens_per_rank: int | None = None,
    ) -> Dispatched:
        """As `LayerView.dispatch`."""
        start = time.perf_counter()
        routed = self._layer.dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, num_tokens_per_rank=num_tokens_per_rank
        )
        self.dispatch_us.append((time.perf_counter() - start) * 1e6)
        return routed

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """As `LayerView.combine`."""
        return self._layer.combine(rows, handle, apply_scores=apply_scores)


class Attention(nn.Module):
    """Causal self-attention over one sequence `[T, D]`, written out: its gradients have the same bits in every run."""

    def __init__(self, sizes: StepSizes) -> None:
        super().__init__()
        self.num_heads = max(1, sizes.hidden_dim // _HEAD_DIM)
        self.inward = nn.Linear(sizes.hidden_dim, 3 * sizes.hidden_dim, bias=False)
        self.outward = nn.Linear(sizes.hidden_dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to the same shape."""
        query, key, value = self.inward(x).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        weights = (query @ key.mT) * query.shape[-1] ** -0.5
        later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        heads = weights.masked_fill(later, -torch.inf).softmax(-1) @ value
        out: Tensor = self.outward(heads.transpose(0, 1).flatten(1))
        return out


class Block(nn.Module):
    """Attention, then a mixture of experts, each behind a norm and added to the tokens."""

    def __init__(self, sizes: StepSizes, dispatcher: TokenDispatcher, number: int, routing: RoutingKind) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.hidden_dim) for _ in range(2))
        self.attention = Attention(sizes)
        self.layer = TimedLayer(dispatcher.layer(f"blocks.{number}.moe"))
        num_local = dispatcher.num_local_experts
        experts = GroupedExperts(
            num_local,
            sizes.hidden_dim,
            sizes.ffn_dim,
            seed=number,
            first_expert_id=dispatcher.ep_rank * num_local,
        )
        router = nn.Linear(sizes.hidden_dim, sizes.num_experts, bias=False)
        self.moe = MoE(self.layer, router, experts, routing=_router(sizes, routing))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to the same shape."""
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.moe(self.norms[1](x))
        return out


class StepModel(nn.Module):
    """All blocks; the same dense weights on every rank."""

    def __init__(self, sizes: StepSizes, dispatcher: TokenDispatcher, routing: RoutingKind) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(sizes, dispatcher, i, routing) for i in range(sizes.num_layers))
        self.to(dispatcher.device, sizes.torch_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x

    def timed_layers(self) -> list[TimedLayer]:
        """Of every block."""
        return [block.layer for block in self.blocks if isinstance(block, Block)]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank has a copy of."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." not in name]


def _router(sizes: StepSizes, routing: RoutingKind) -> Callable[[Tensor], Routing]:
    if routing == "dynamic":
        return partial(softmax_topk, top_k=sizes.top_k)

    def balanced(logits: Tensor) -> Routing:
        """Experts in turn, weighted by what the router says of them, so that it learns in either routing."""
        ids = static_balanced(logits.shape[0], sizes.top_k, sizes.num_experts, device=logits.device).topk_expert_ids
        return Routing(logits.gather(1, ids).softmax(1), ids)

    return balanced
