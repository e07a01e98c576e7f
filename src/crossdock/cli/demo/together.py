"""The whole group's batch on one rank: dense parts run part by part, the experts on all parts at once (EP 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossdock import Dispatched, DispatcherConfig, DispatchHandle, TokenDispatcher
from crossdock.nn import MoE
from crossdock.routing import Routing
from crossdock.types import DispatchLayer

from .model import Transformer
from .parallel import SequenceSharding


@contextmanager
def dispatcher_alone(config: DispatcherConfig) -> Iterator[TokenDispatcher]:
    """A dispatcher of EP size 1 inside a larger world; every rank opens one of its own."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        with TokenDispatcher(config, group) as dispatcher:
            yield dispatcher
    finally:
        dist.destroy_process_group(group)


class Recorder:
    """A layer of a dispatcher that keeps what passes through it, gradients included, for one forward and backward."""

    def __init__(self, layer: DispatchLayer) -> None:
        self._layer = layer
        self._seen: dict[str, Tensor] = {}
        self.tokens_per_expert = torch.empty(0)

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
        # Views of their own, so that their gradients are those of dispatch alone: the router has x as well.
        x, topk_scores = self._keep(x=x.view_as(x), scores=topk_scores.view_as(topk_scores))
        routed = self._layer.dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, num_tokens_per_rank=num_tokens_per_rank
        )
        self._keep(rows=routed.rows)
        self.tokens_per_expert = routed.tokens_per_expert
        return routed

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """As `LayerView.combine`."""
        self._keep(expert_rows=rows)
        out = self._layer.combine(rows, handle, apply_scores=apply_scores)
        self._keep(outputs=out)
        return out

    def seen(self) -> dict[str, Tensor]:
        """Every tensor by name, and after a backward its gradient as "d" and the name."""
        grads = {f"d{name}": tensor.grad for name, tensor in self._seen.items() if tensor.grad is not None}
        return {**{name: tensor.detach() for name, tensor in self._seen.items()}, **grads}

    def _keep(self, **tensors: Tensor) -> list[Tensor]:
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.retain_grad()
        self._seen.update(tensors)
        return list(tensors.values())


def forward_parts(models: Sequence[Transformer], parts: Sequence[Tensor]) -> list[Tensor]:
    """Logits of every rank's tokens, computed on this one rank.

    Args:
        models: one a part, of EP size 1 and with equal weights: the first one's experts serve all parts; the dense
            weights of each serve its own part, so that their gradients stay apart until they are summed.
        parts: `[B, S]` bytes by rank.
    """
    sharding = SequenceSharding(parts[0].shape[1])
    hidden = [model.embed(tokens) for model, tokens in zip(models, parts, strict=True)]
    for blocks in zip(*[model.each_block() for model in models], strict=True):
        hidden = [x + block.attention(x, sharding) for block, x in zip(blocks, hidden, strict=True)]
        tokens = [block.norm(x).flatten(0, 1) for block, x in zip(blocks, hidden, strict=True)]
        mixed = moe_on_parts([block.moe for block in blocks], tokens)
        hidden = [x + out.view_as(x) for x, out in zip(hidden, mixed, strict=True)]
    return [model.read_out(x) for model, x in zip(models, hidden, strict=True)]


def moe_on_parts(layers: Sequence[MoE], parts: Sequence[Tensor]) -> list[Tensor]:
    """What `MoE.forward` does, with each part's own router and the first layer's experts on all parts at once."""
    routings = [route(layer, tokens) for layer, tokens in zip(layers, parts, strict=True)]
    routed = layers[0].layer.dispatch(
        torch.cat(list(parts)),
        torch.cat([routing.topk_scores for routing in routings]),
        torch.cat([routing.topk_expert_ids for routing in routings]),
    )
    rows = layers[0].experts(routed.rows, routed.expert_offsets)
    return list(layers[0].layer.combine(rows, routed.handle).split([len(tokens) for tokens in parts]))


def route(layer: MoE, tokens: Tensor) -> Routing:
    """The layer's own routing of one part `[T, hidden_dim]`."""
    return layer.routing(nn.functional.linear(tokens.float(), layer.router.weight.float()))
