"""One rank: rows are permuted, nothing travels. Any device."""

from __future__ import annotations

import torch

from ..inputs import refuse_bad_ids
from ..permute import (
    SlotMap,
    count_by_expert,
    drop_bad_ids,
    kept_within,
    map_slots,
    map_slots_within,
    padded_ends,
    take_or_zero,
)
from ..rows import gather_rows, reduce_rows
from ..types import SUPPORTED_DTYPES
from .base import (
    EVERY_ROW_CAPACITY,
    Backend,
    BackendTraits,
    Call,
    Demand,
    GroupFacts,
    Layout,
    Link,
    NewSize,
    Received,
    Transport,
    TransportSpec,
    Weights,
)


class LocalTransport(Transport):
    """All of `Transport` within one rank; `fast` and `exact` are the same sum here. Its layout is a `SlotMap`."""

    def __init__(self, spec: TransportSpec) -> None:
        self.spec = spec
        self._host_syncs = 0

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        alignment = self.spec.expert_alignment
        expert_ids, num_bad_ids = drop_bad_ids(expert_ids, self.spec.num_experts)
        wanted = count_by_expert(expert_ids, self.spec.num_experts)
        counts, ends = wanted, padded_ends(wanted, alignment)
        if num_rows is None:
            num_slots, num_come, num_bad = torch.stack([wanted.sum(), ends[-1], num_bad_ids]).tolist()
            self._host_syncs += 1
            refuse_bad_ids([num_bad], self.spec.num_experts)
            layout = map_slots(expert_ids, wanted, alignment, num_slots, num_come)
        else:
            layout = map_slots_within(expert_ids, wanted, alignment, num_rows)
            counts, ends = kept_within(wanted, ends, num_rows)
        return Received(
            rows=self._spread(x, layout),
            row_scores=take_or_zero(scores.reshape(-1), layout.slot_of_row),
            tokens_per_expert=counts,
            expert_offsets=ends.to(torch.int32),
            layout=list(layout),
            demand=Demand(wanted, num_bad_ids.view(1)),
        )

    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        return self._spread(x, SlotMap(*layout))

    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        return reduce_rows(rows, SlotMap(*layout).row_of_slot, None if weights is None else weights.of_slots)

    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        return take_or_zero(values, SlotMap(*layout).row_of_slot)

    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        row_of_slot = like.new_empty((num_tokens, self.spec.top_k), dtype=torch.int64)
        return list(SlotMap(row_of_slot, like.new_empty((num_rows,), dtype=torch.int64)))

    def num_host_syncs(self) -> int:
        return self._host_syncs

    def _spread(self, x: torch.Tensor, layout: SlotMap) -> torch.Tensor:
        may_be_absent = self.spec.expert_alignment > 1 or self.spec.row_capacity.kind != "exact"
        return gather_rows(x, layout.slot_of_row, divisor=self.spec.top_k, may_be_absent=may_be_absent)


class LocalBackend(Backend):
    """The backend of a group of one."""

    name = "local"
    preference = "preferred"
    traits = BackendTraits(
        devices=frozenset({"cpu", "cuda"}), dtypes=frozenset(SUPPORTED_DTYPES), row_capacities=EVERY_ROW_CAPACITY
    )

    def workspace_bytes(self, spec: TransportSpec) -> int:
        return 0

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        if group.size > 1:
            return f"it serves one rank, and this group has {group.size}"
        return super().refusal(spec, group)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        return LocalTransport(spec)
