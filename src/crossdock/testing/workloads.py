"""The workloads of the conformance suite: routings that dispatchers were seen to get wrong, times everything else.

A workload is a frozen record of choices; `Workload.problem()` makes its tensors for all ranks, the same on every rank
and in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..backends.base import BackendTraits
from ..types import DispatcherConfig, Reduction, RowCapacity
from .pairwise import every_pair
from .problems import ExpertKind, Problem
from .routings import ROUTINGS, Routing, routing_table

HIDDEN_DIM = 40  # a multiple of 8, not of 16; more where a backend's rows must be wider
TIMEOUT_S = 20.0
MAX_TOKENS = 16
_TWICE, _ORDER_MATTERS = "a token names an expert twice", "a product's bits depend on the row order"


class NotOffered(Exception):
    """A backend lacks a trait that a scenario needs; says which, as `Workload.missing_trait` does."""


FACTORS: dict[str, tuple[Any, ...]] = {
    "routing": ROUTINGS,
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "alignment": (1, 16, 32, 128),
    "reduction": ("fast", "exact"),
    "experts": ("identity", "linear", "swiglu"),
    "scores": ("after", "inside"),
    "call": ("plain", "strided"),
    "capacity": ("exact", "worst_case", "balanced", "rows", "too small"),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One choice of everything that a dispatch and its combine can be asked for.

    Attributes:
        ep_size: ranks of the group.
        routing: a name in `ROUTINGS`.
        dtype: of the rows.
        alignment: `expert_alignment`.
        reduction: "fast" or "exact".
        experts: "identity", "linear" (`f_e(v) = (e + 1) v`) or "swiglu".
        scores: applied "after" the experts, by combine, or "inside" them.
        call: "plain" inputs; or "strided": non-contiguous, int32 ids, with `num_tokens_per_rank` and a histogram.
        capacity: a kind of row capacity, "balanced" just large enough and "rows" with some to spare; or "too small",
            for about half of the fullest rank's rows: the others are dropped.
        hidden_dim: width of the rows.
        max_top_k: the most slots of a token, where its routing has more; None is no limit.
        distinct_experts: whether the configuration declares that no token names an expert twice.
        ordered_rows: whether rows must come in the contract's order.

    """

    ep_size: int
    routing: str
    dtype: torch.dtype = torch.float32
    alignment: int = 1
    reduction: Reduction = "fast"
    experts: ExpertKind = "linear"
    scores: Literal["after", "inside"] = "after"
    call: Literal["plain", "strided"] = "plain"
    capacity: Literal["exact", "worst_case", "balanced", "rows", "too small"] = "exact"
    hidden_dim: int = HIDDEN_DIM
    max_top_k: int | None = None
    distinct_experts: bool = False
    ordered_rows: bool = True

    def __str__(self) -> str:
        parts = (self.routing, str(self.dtype).removeprefix("torch."), f"align {self.alignment}", self.reduction)
        return ", ".join((*parts, self.experts, f"scores {self.scores}", self.call, f"capacity {self.capacity}"))

    def fitted(self, traits: BackendTraits) -> Workload:
        """The same choices as a backend needs them: wide enough, of few slots, with what it wants declared."""
        return dataclasses.replace(
            self,
            hidden_dim=-(-self.hidden_dim // traits.hidden_multiple) * traits.hidden_multiple,
            max_top_k=traits.max_top_k if self.max_top_k is None else self.max_top_k,
            distinct_experts=self.distinct_experts or not traits.duplicate_experts,
            ordered_rows=self.ordered_rows and traits.ordered_rows,
        )

    def missing_trait(self, traits: BackendTraits, device_type: str) -> str | None:
        """Which trait keeps a backend from running it on a device, with its value; None if none does."""
        config = self.problem().config
        capacity = config.row_capacity
        wants = (
            ("reductions", self.reduction in traits.reductions, self.reduction),
            ("row_capacities", capacity.kind in traits.row_capacities, str(capacity)),
            ("sync_free_devices", traits.offers(capacity.kind, device_type), f"{capacity} on {device_type}"),
            ("dtypes", self.dtype in traits.dtypes, str(self.dtype)),
            (
                "duplicate_experts",
                traits.duplicate_experts or not self.repeats_experts,
                _TWICE,
            ),
            ("max_top_k", traits.max_top_k is None or config.top_k <= traits.max_top_k, f"top_k is {config.top_k}"),
            ("hidden_multiple", self.hidden_dim % traits.hidden_multiple == 0, f"hidden_dim is {self.hidden_dim}"),
            ("ordered_rows", traits.ordered_rows or self.experts != "swiglu", _ORDER_MATTERS),
        )
        return next((f"{name}: {why}" for name, offered, why in wants if not offered), None)

    @property
    def seed(self) -> int:
        """A number of these choices; a fitted workload draws by the same one."""
        choices = {name: getattr(self, name) for name in ("ep_size", *FACTORS)}
        return int.from_bytes(hashlib.sha256(repr(sorted(choices.items(), key=str)).encode()).digest()[:4], "little")

    @property
    def repeats_experts(self) -> bool:
        """Whether some token names an expert twice."""
        ids = self.problem().topk_expert_ids
        return any(
            len(set(valid)) < len(valid)
            for part in ids
            for row in part.tolist()
            if (valid := [i for i in row if i >= 0])
        )

    def problem(self) -> Problem:
        """The tensors of all ranks."""
        return _problem(self)


@functools.lru_cache(maxsize=8)
def _problem(workload: Workload) -> Problem:
    routing = routing_table(workload.ep_size)[workload.routing]
    if workload.max_top_k is not None:
        routing = dataclasses.replace(routing, top_k=min(routing.top_k, workload.max_top_k))
    config = DispatcherConfig(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        hidden_dim=workload.hidden_dim,
        dtype=workload.dtype,
        num_max_tokens_per_rank=MAX_TOKENS,
        expert_alignment=workload.alignment,
        reduction=workload.reduction,
        distinct_experts=workload.distinct_experts,
        timeout_s=TIMEOUT_S,
    )
    generator = torch.Generator().manual_seed(workload.seed)
    ids = [routing.draw(generator, routing, rank, tokens) for rank, tokens in enumerate(routing.num_tokens)]
    bound = max(routing.num_tokens) if workload.call == "strided" else MAX_TOKENS
    config = dataclasses.replace(
        config,
        row_capacity=_row_capacity(workload, routing, ids, bound),
        on_overflow="drop" if workload.capacity == "too small" else "raise",
    )
    return Problem.draw(config, ids, generator).replace(
        experts=workload.experts,
        apply_scores=workload.scores == "after",
        strided=workload.call == "strided",
        ordered_rows=workload.ordered_rows,
    )


def _row_capacity(workload: Workload, routing: Routing, ids: list[torch.Tensor], bound: int) -> RowCapacity:
    """The capacity of a workload whose ranks may bring `bound` tokens."""
    named = torch.bincount(torch.cat(ids)[torch.cat(ids) >= 0], minlength=routing.num_experts)
    by_rank, alignment = named.view(routing.ep_size, -1), workload.alignment
    slots = max(bound, 1) * routing.top_k
    most = int(by_rank.sum(1).max())
    most_padded = int(((by_rank + alignment - 1) // alignment * alignment).sum(1).max())
    match workload.capacity:
        case "exact":
            return RowCapacity.exact()
        case "worst_case":
            return RowCapacity.worst_case()
        case "balanced":
            return RowCapacity.balanced(max(most, 1) / slots)
        case "rows":
            return RowCapacity.rows(most_padded + 2 * alignment)
    if kind_of_capacity(workload.capacity, alignment) == "balanced":
        # Half the rows, half way to the next multiple of 4.
        return RowCapacity.balanced(max(most // 2 - 2, 1) / slots)
    return RowCapacity.rows(max(most_padded // 2 // alignment, 1) * alignment)


def kind_of_capacity(capacity: str, alignment: int) -> str:
    """The kind of `RowCapacity` that a workload's capacity is at an alignment."""
    if capacity != "too small":
        return capacity
    return "balanced" if alignment == 1 else "rows"


def whole_grid(ep_size: int) -> Iterator[Workload]:
    """Every choice of all factors but the capacity, and those in turn: each with every value of any two others."""
    *names, capacity = FACTORS
    values = itertools.product(*(FACTORS[name] for name in names))
    for chosen, turn in zip(values, itertools.cycle(FACTORS[capacity])):
        yield Workload(ep_size=ep_size, capacity=turn, **dict(zip(names, chosen, strict=True)))


def pairwise_grid(ep_size: int) -> Iterator[Workload]:
    """So many workloads of a group size that every pair of two factors' values occurs."""
    for row in every_pair(FACTORS):
        yield Workload(ep_size=ep_size, **row)


def rest_of_pairs(ran: Sequence[Workload], ep_size: int, traits: BackendTraits, device_type: str) -> list[Workload]:
    """Workloads for the pairs of values that a backend offers on a device and that none of those that `ran` has."""
    rows = [{factor: getattr(workload, factor) for factor in FACTORS} for workload in ran]
    num_ran = len(rows)
    for factors in _offered(ep_size, traits, device_type):
        rows += every_pair(factors, covered=rows)
    return [Workload(ep_size=ep_size, **row) for row in rows[num_ran:]]


def _offered(ep_size: int, traits: BackendTraits, device_type: str) -> Iterator[dict[str, Sequence[Any]]]:
    """`FACTORS` with the offered values alone: once for all alignments that go with the same capacities."""
    offered: dict[str, Sequence[Any]] = {
        **FACTORS,
        "routing": [
            name
            for name, routing in routing_table(ep_size).items()
            if traits.duplicate_experts or not routing.may_repeat
        ],
        "dtype": [dtype for dtype in FACTORS["dtype"] if dtype in traits.dtypes],
        "reduction": [reduction for reduction in FACTORS["reduction"] if reduction in traits.reductions],
        "experts": [kind for kind in FACTORS["experts"] if traits.ordered_rows or kind != "swiglu"],
    }
    alignments: dict[tuple[str, ...], list[int]] = {}
    for alignment in FACTORS["alignment"]:
        kinds = {capacity: kind_of_capacity(capacity, alignment) for capacity in FACTORS["capacity"]}
        capacities = tuple(capacity for capacity, kind in kinds.items() if traits.offers(kind, device_type))
        alignments.setdefault(capacities, []).append(alignment)
    for capacities, alike in alignments.items():
        factors = {**offered, "alignment": alike, "capacity": capacities}
        if all(factors.values()):  # else no workload is of values that are offered
            yield factors
