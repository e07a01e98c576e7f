"""One mixture-of-experts layer: router, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import TokenDispatcher
from ..errors import ConfigError, InvalidInput
from ..routing import Routing
from ..types import DispatcherConfig, DispatchLayer
from .experts import GroupedExperts

ScorePlacement = Literal["after", "inside"]

# Types of devices that a host has to wait for before it can read a number.
_ASYNC_DEVICE_TYPES = frozenset({"cuda"})


@dataclass(frozen=True, eq=False)
class MoEResult:
    """An MoE layer's output with what its router decided.

    Attributes:
        out: the layer's output, shaped as its input.
        routing: scores and global ids of this rank's tokens, for auxiliary losses and load statistics
            (`crossdock.routing.count_tokens_per_expert`).
        tokens_per_expert: `[num_local_experts]` int64: rows of each local expert, from all ranks.
    """

    out: Tensor
    routing: Routing
    tokens_per_expert: Tensor


class MoE(nn.Module):
    """A mixture-of-experts layer: `combine(experts(dispatch(x, routing(router(x)))))`, plus a shared expert if given.

        num_local, first = dispatcher.num_local_experts, dispatcher.ep_rank * dispatcher.num_local_experts
        moe = MoE(
            dispatcher.layer("blocks.3.moe"),
            router=nn.Linear(2048, 64, bias=False),  # the same on every rank: seed it, or broadcast it
            experts=GroupedExperts(num_local, 2048, 768, seed=3, first_expert_id=first),  # others on every rank
            routing=functools.partial(crossdock.routing.softmax_topk, top_k=8),
        )
        y = moe(x)

    The layer keeps nothing of a call and compiles with `fullgraph=True`. Under `RowCapacity.exact()` dispatch
    waits for its counts. Under the other kinds a call on a GPU waits for nothing (but to calibrate) unless its experts
    do, and those that say so are refused: whose attribute `reads_counts_on_host` is True, as that of `GroupedExperts`
    is in some dtypes and widths. They are refused when the layer is made if their weights are on a GPU by then, in the
    dispatcher's dtype, else in the first eager call that finds them so; never while a compiler traces.

    Args:
        layer: dispatches and combines; not a module, so it is no part of the state dict.
        router: from a token to logits `[num_experts]`; run in float32 whatever its dtype, autocast included.
        experts: called as `experts(rows, expert_offsets, scores)` with None for scores that are applied after.
        routing: from logits `[T, num_experts]`, and `token_mask=` when forward is given one, to a `Routing`.
        score_placement: "after" lets combine weight the experts' outputs, in float32; "inside" hands the scores to
            the experts (`GroupedExperts` puts them between up and down projection), which saves keeping the experts'
            outputs for backward, at the price of one more rounding.
        shared_expert: a module that sees every token `[T, hidden_dim]`; its output is added.

    Raises:
        ConfigError: a `score_placement` that does not exist; a router, or `GroupedExperts`, of other sizes than those
            of the layer's dispatcher, or seeded for another rank; experts that would wait for counts, see above.
    """

    def __init__(
        self,
        layer: DispatchLayer,
        router: nn.Linear,
        experts: nn.Module,
        *,
        routing: Callable[..., Routing],
        score_placement: ScorePlacement = "after",
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if score_placement not in ("after", "inside"):
            raise ConfigError(f"score_placement must be 'after' or 'inside', got {score_placement!r}")
        _check_sizes(layer, router, experts)
        self.layer = layer
        self.router = router
        self.experts = experts
        self.routing = routing
        self.score_placement = score_placement
        self.shared_expert = shared_expert
        self._checked_layer: DispatchLayer | None = None  # the layer for which the experts are known not to wait
        self._check_experts(None)

    def forward(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: int | None = None,
        token_mask: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | MoEResult:
        """Run the layer on this rank's tokens; every rank of the group takes part, also with no tokens.

        Args:
            x: `[..., hidden_dim]`, of the dispatcher's dtype.
            num_tokens_per_rank: this call's bound on every rank's tokens, passed to dispatch.
            token_mask: bool, shaped as `x` without its last dimension; False for padding tokens, which go to no expert.
            return_routing: return a `MoEResult` instead of the output alone.

        Raises:
            InvalidInput: an `x` of another width than the router's.
            ConfigError: experts that would wait for counts, see the class.
        """
        # The compiler's word comes first: what is behind it would be a guard of the compiled code.
        if (
            not torch.compiler.is_compiling()
            and self._checked_layer is not self.layer
            and x.device.type in _ASYNC_DEVICE_TYPES
        ):
            self._check_experts(x.device)
        if x.shape[-1] != self.router.in_features:
            raise InvalidInput(f"x must be [..., {self.router.in_features}], as the router takes, got {list(x.shape)}")
        tokens = x.reshape(-1, x.shape[-1]).contiguous()  # strides would change the router's bits
        routing = self._route(tokens, token_mask)
        routed = self.layer.dispatch(
            tokens, routing.topk_scores, routing.topk_expert_ids, num_tokens_per_rank=num_tokens_per_rank
        )
        inside = self.score_placement == "inside"
        rows = self.experts(routed.rows, routed.expert_offsets, routed.scores if inside else None)
        out = self.layer.combine(rows, routed.handle, apply_scores=not inside)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        out = out.reshape(x.shape)
        return MoEResult(out, routing, routed.tokens_per_expert) if return_routing else out

    def _check_experts(self, rows_device: torch.device | None) -> None:
        """Refuse experts that make calls on a GPU wait for counts; admit those whose calls there are known not to.

        Neither where weights are not of the rows' dtype, or on a CPU: something is yet to cast or move them, for good
        or for every call.
        """
        config = _config_of(self.layer)
        if config is None:
            return
        weights = next(self.experts.parameters(), None) if isinstance(self.experts, nn.Module) else None
        device = rows_device if weights is None else weights.device
        if device is None or (weights is not None and weights.dtype != config.dtype):
            return
        reads = getattr(self.experts, "reads_counts_on_host", False) is True
        if waits_for_counts(device.type, config.row_capacity.kind, reads):
            raise ConfigError(
                f"{type(self.experts).__name__} ({config.dtype}) on {device} would wait for its counts in every call,"
                f" which row_capacity {config.row_capacity} is there to avoid: change dtype or widths until its"
                " reads_counts_on_host is False (GroupedExperts: bfloat16, multiples of 8, compute capability 9 or 10),"
                " or take row_capacity exact()"
            )
        if device.type in _ASYNC_DEVICE_TYPES:
            self._checked_layer = self.layer

    def _route(self, tokens: Tensor, token_mask: Tensor | None) -> Routing:
        masked: dict[str, Any] = {} if token_mask is None else {"token_mask": token_mask.reshape(-1)}
        with torch.autocast(tokens.device.type, enabled=False):
            bias = None if self.router.bias is None else self.router.bias.float()
            logits = nn.functional.linear(tokens.float(), self.router.weight.float(), bias)
            return self.routing(logits, **masked)


def waits_for_counts(device_type: str, row_capacity_kind: str, reads_on_host: bool) -> bool:
    """Whether experts that read their counts on the host make a call wait whose dispatch does not.

    >>> [waits_for_counts(*case) for case in (("cuda", "rows", True), ("cuda", "exact", True), ("cpu", "rows", True))]
    [True, False, False]
    """
    return device_type in _ASYNC_DEVICE_TYPES and row_capacity_kind != "exact" and reads_on_host


def _dispatcher_of(layer: DispatchLayer) -> TokenDispatcher | None:
    """Behind a layer; None behind one that is not ours."""
    dispatcher = getattr(layer, "dispatcher", layer)
    return dispatcher if isinstance(dispatcher, TokenDispatcher) else None


def _config_of(layer: DispatchLayer) -> DispatcherConfig | None:
    dispatcher = _dispatcher_of(layer)
    return None if dispatcher is None else dispatcher.config


def _check_sizes(layer: DispatchLayer, router: nn.Module, experts: nn.Module) -> None:
    """What would else be found out in a call, or on a GPU after it: ids that no expert has."""
    dispatcher = _dispatcher_of(layer)
    if dispatcher is None:
        return
    config, wanted = dispatcher.config, list[tuple[str, int, str, int]]()
    if isinstance(router, nn.Linear):
        wanted += [
            ("router.in_features", router.in_features, "hidden_dim", config.hidden_dim),
            ("router.out_features", router.out_features, "num_experts", config.num_experts),
        ]
    if isinstance(experts, GroupedExperts):
        num_local = dispatcher.num_local_experts
        wanted += [
            ("experts.hidden_dim", experts.hidden_dim, "hidden_dim", config.hidden_dim),
            ("experts.num_local_experts", experts.num_local_experts, "num_local_experts", num_local),
        ]
        wanted += _first_expert(experts, dispatcher)
    for name, size, of_dispatcher, right in wanted:
        if size != right:
            raise ConfigError(f"{name} ({size}) must be {of_dispatcher} of its dispatcher ({right})")


def _first_expert(experts: GroupedExperts, dispatcher: TokenDispatcher) -> list[tuple[str, int, str, int]]:
    """What seeded experts have to be: without it several ranks begin with the same ones, and nothing shows it."""
    if experts.seed is None:
        return []
    if experts.first_expert_id is None and dispatcher.ep_size > 1:
        raise ConfigError(
            f"experts of seed {experts.seed} without first_expert_id are the same on all {dispatcher.ep_size} ranks of"
            " their dispatcher: pass first_expert_id=ep_rank * num_local_experts"
        )
    first = dispatcher.ep_rank * dispatcher.num_local_experts
    return [("experts.first_expert_id", experts.first_expert_id or 0, "ep_rank * num_local_experts", first)]
