"""The layout of one staged dispatch, and who works it out: plain tensor arithmetic on a CPU, kernels on a GPU.

Both give the same tensors. A planner works in two steps around the one exchange of counts: what leaves this rank, then
where everything stands that leaves and arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ..group.fingerprint import NUM_WORDS
from ..permute import (
    SlotMap,
    count_by_expert,
    drop_bad_ids,
    first_true,
    kept_within,
    map_slots,
    padded_ends,
    take_or_zero,
)
from .base import TransportSpec

# A header to one rank: the fingerprint, token rows for that rank, ids outside the range, slots by expert of that rank.
TOKEN_ROWS, BAD_IDS, COUNTS = NUM_WORDS, NUM_WORDS + 1, NUM_WORDS + 2


class WireLayout(NamedTuple):
    """Where every row of one dispatch goes, from both ends. T tokens, S sent and A arrived token rows, R expert rows.

    Attributes:
        token_of_sent: `[S]` int64: the token of every row this rank sends, in table order of the destination.
        sent_of_token: `[T, ep_size]` int64: where a token stands among the sent rows for a rank; -1 if it is not sent.
        sent_slot_of_slot: `[T, top_k]` int64: the flat slot of a sent row, `sent * top_k + k`; -1 without an expert.
        row_of_slot: `[A, top_k]` int64: the expert row of an arrived row's slot; -1 if its expert is elsewhere.
        slot_of_row: `[R]` int64: the flat slot of an arrived row, `arrived * top_k + k`; -1 on padding rows.
        splits: `[4, ep_size]` int64 on the CPU: token rows sent to and arrived from each rank, slots sent and arrived.
        home_of_slot: `[T, top_k]` int64, `exact` only: where a slot's row stands among those that come home; -1 without
            an expert, and where it was dropped.
        row_of_home: `[sum of arrived slots]` int64, `exact` only: the expert rows in the order they go home; -1 for a
            slot that was dropped, for which a row of zeros goes.
    """

    token_of_sent: torch.Tensor
    sent_of_token: torch.Tensor
    sent_slot_of_slot: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    splits: torch.Tensor
    home_of_slot: torch.Tensor
    row_of_home: torch.Tensor


class Counts(NamedTuple):
    """What the swapped headers say, on the host.

    Attributes:
        sent: token rows sent to each rank.
        arrived: token rows that come from each rank.
        slots_sent: slots of those sent to each rank.
        slots_arrived: slots of those that come from each rank.
        by_expert: `[e]` int64 on the CPU: slots that name each local expert.
        num_rows: rows of the local experts with padding.
    """

    sent: list[int]
    arrived: list[int]
    slots_sent: list[int]
    slots_arrived: list[int]
    by_expert: torch.Tensor
    num_rows: int

    @classmethod
    def read(cls, left: torch.Tensor, came: torch.Tensor, alignment: int) -> Counts:
        """From the headers `[ep_size, W]` that left and came, on the CPU."""
        by_expert = came[:, COUNTS:].sum(0)
        return cls(
            sent=left[:, TOKEN_ROWS].tolist(),
            arrived=came[:, TOKEN_ROWS].tolist(),
            slots_sent=left[:, COUNTS:].sum(1).tolist(),
            slots_arrived=came[:, COUNTS:].sum(1).tolist(),
            by_expert=by_expert,
            num_rows=int(padded_ends(by_expert, alignment)[-1]),
        )

    def splits(self) -> torch.Tensor:
        """`WireLayout.splits`."""
        return torch.tensor([self.sent, self.arrived, self.slots_sent, self.slots_arrived])


class Sent(NamedTuple):
    """The first three tensors of `WireLayout`."""

    token_of_sent: torch.Tensor
    sent_of_token: torch.Tensor
    sent_slot_of_slot: torch.Tensor


class Arrived(NamedTuple):
    """Where arrived slots go: a `SlotMap` in table order, and what the caller is told of the rows."""

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    row_scores: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor

    def fitted(self, num_rows: int) -> Arrived:
        """The same cut off, or filled up with absent rows, at `num_rows`; slots whose row lies behind it have none."""
        counts, ends = kept_within(self.tokens_per_expert, self.expert_offsets, num_rows)
        return Arrived(
            row_of_slot=dropped_behind(self.row_of_slot, num_rows),
            slot_of_row=_resized(self.slot_of_row, num_rows, -1),
            row_scores=_resized(self.row_scores, num_rows, 0.0),
            tokens_per_expert=counts,
            expert_offsets=ends,
        )


def dropped_behind(row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of any shape, -1 for those that lie at or behind `num_rows`."""
    return torch.where(row < num_rows, row, -1)


def _resized(values: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    if size <= values.shape[0]:
        return values[:size].clone()
    return torch.cat([values, values.new_full((size - values.shape[0],), fill)])


class Planner(ABC):
    """Works out one dispatch's layout for a fixed spec."""

    def __init__(self, spec: TransportSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        remote = [rank for rank in range(spec.ep_size) if rank != spec.rank]
        self.table_order = torch.tensor([*remote, spec.rank], device=device)
        self.place_in_table = torch.argsort(self.table_order)

    @abstractmethod
    def count(self, expert_ids: torch.Tensor, headers: torch.Tensor) -> None:
        """Write what leaves for each rank into its header."""

    @abstractmethod
    def place_sent(self, expert_ids: torch.Tensor, headers: torch.Tensor, counts: Counts) -> Sent:
        """Where the rows stand that leave; `headers` are those that left, on this device."""

    @abstractmethod
    def place_arrived(self, slots: torch.Tensor, counts: Counts) -> Arrived:
        """Where the slots go that arrived: `[A, 2 * top_k]` int32, global ids and the bits of float32 scores."""

    def place_home(
        self, expert_ids: torch.Tensor, arrived: Arrived, counts: Counts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`home_of_slot` and `row_of_home` of `WireLayout`; empty unless the reduction is exact."""
        if self.spec.reduction != "exact":
            return arrived.row_of_slot.new_empty(0, self.spec.top_k), arrived.row_of_slot.new_empty(0)
        ids, _ = drop_bad_ids(expert_ids.to(torch.int64), self.spec.num_experts)
        rank = _rank_of(ids.reshape(-1), self.spec)
        key = torch.where(rank < 0, self.spec.ep_size, self.place_in_table[rank.clamp(min=0)]).to(torch.int32)
        coming = torch.sort(key, stable=True).indices[: sum(counts.slots_sent)]
        home_of_slot = torch.full_like(rank, -1).scatter_(0, coming, torch.arange(coming.shape[0], device=self.device))
        rows = arrived.row_of_slot.reshape(-1)
        return home_of_slot.view_as(ids), rows[first_true(rows >= 0, sum(counts.slots_arrived))]


def _rank_of(expert_ids: torch.Tensor, spec: TransportSpec) -> torch.Tensor:
    return torch.div(expert_ids, spec.num_local_experts, rounding_mode="floor")  # -1 stays -1


class PlainPlanner(Planner):
    """In tensor arithmetic: the meaning of the kernels, and what runs on a CPU."""

    def count(self, expert_ids: torch.Tensor, headers: torch.Tensor) -> None:
        ids, num_bad = drop_bad_ids(expert_ids.to(torch.int64), self.spec.num_experts)
        headers[:, TOKEN_ROWS] = self._wants(_rank_of(ids, self.spec)).sum(0)
        headers[:, BAD_IDS] = num_bad
        headers[:, COUNTS:] = count_by_expert(ids, self.spec.num_experts).view(self.spec.ep_size, -1)

    def place_sent(self, expert_ids: torch.Tensor, headers: torch.Tensor, counts: Counts) -> Sent:
        (num_tokens, top_k), ep_size = expert_ids.shape, self.spec.ep_size
        rank_of_slot = _rank_of(expert_ids.to(torch.int64), self.spec)
        by_rank = self._wants(rank_of_slot).t()[self.table_order].reshape(-1)
        token_of_sent = first_true(by_rank, sum(counts.sent)) % max(num_tokens, 1)
        position = torch.where(by_rank, torch.cumsum(by_rank, 0) - 1, -1).view(ep_size, num_tokens)
        sent_of_token = position[self.place_in_table].t().contiguous()
        sent = sent_of_token.gather(1, rank_of_slot.clamp(min=0))
        sent_slot = sent * top_k + torch.arange(top_k, device=self.device)
        return Sent(token_of_sent, sent_of_token, torch.where(rank_of_slot < 0, -1, sent_slot))

    def place_arrived(self, slots: torch.Tensor, counts: Counts) -> Arrived:
        num_local, top_k = self.spec.num_local_experts, self.spec.top_k
        local = slots[:, :top_k].to(torch.int64) - self.spec.rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        by_expert = counts.by_expert.to(self.device)
        placed = self._place(local, by_expert, counts)
        scores = slots[:, top_k:].contiguous().view(torch.float32)
        return Arrived(
            *placed,
            row_scores=take_or_zero(scores.reshape(-1), placed.slot_of_row),
            tokens_per_expert=by_expert,
            expert_offsets=padded_ends(by_expert, self.spec.expert_alignment).to(torch.int32),
        )

    def _wants(self, rank_of_slot: torch.Tensor) -> torch.Tensor:
        """`[T, ep_size]` bool: whether a token has a slot on a rank."""
        column = torch.where(rank_of_slot < 0, self.spec.ep_size, rank_of_slot)
        wants = torch.zeros(rank_of_slot.shape[0], self.spec.ep_size + 1, dtype=torch.bool, device=self.device)
        return wants.scatter_(1, column, True)[:, : self.spec.ep_size]

    def _place(self, local: torch.Tensor, by_expert: torch.Tensor, counts: Counts) -> SlotMap:
        """Rows are ordered by source rank, the table is not: this rank's own rows stand last in it."""
        rank = self.spec.rank
        num, num_own, num_lower = sum(counts.arrived), counts.arrived[rank], sum(counts.arrived[:rank])
        num_higher = num - num_lower - num_own
        args = (by_expert, self.spec.expert_alignment, sum(counts.slots_arrived), counts.num_rows)
        if num_higher == 0 or num_own == 0:
            return map_slots(local, *args)
        lower, higher, own = local.split([num_lower, num_higher, num_own])
        row_of_slot, slot = map_slots(torch.cat([lower, own, higher]), *args)
        lower, own, higher = row_of_slot.split([num_lower, num_own, num_higher])
        first_own, first_higher = num_lower * self.spec.top_k, (num_lower + num_own) * self.spec.top_k
        in_table = slot + (slot >= first_own) * (num_higher * self.spec.top_k)
        in_table -= (slot >= first_higher) * ((num_own + num_higher) * self.spec.top_k)
        return SlotMap(torch.cat([lower, higher, own]), in_table)


class KernelPlanner(Planner):
    """In a handful of kernels, without a host read."""

    def count(self, expert_ids: torch.Tensor, headers: torch.Tensor) -> None:
        from ..kernels.leave import launch_count_leaving

        launch_count_leaving(
            expert_ids.contiguous(), headers, self.spec.num_local_experts, (TOKEN_ROWS, BAD_IDS, COUNTS)
        )

    def place_sent(self, expert_ids: torch.Tensor, headers: torch.Tensor, counts: Counts) -> Sent:
        from ..kernels.leave import launch_place_leaving

        num_local, num_sent = self.spec.num_local_experts, sum(counts.sent)
        placed = launch_place_leaving(expert_ids.contiguous(), headers, num_local, TOKEN_ROWS, self.spec.rank, num_sent)
        return Sent(*placed)

    def place_arrived(self, slots: torch.Tensor, counts: Counts) -> Arrived:
        from ..kernels.place import launch_place

        rank, num_local = self.spec.rank, self.spec.num_local_experts
        share = (sum(counts.arrived[:rank]), counts.arrived[rank])
        experts = (rank * num_local, num_local)
        return Arrived(*launch_place(slots, share, experts, self.spec.expert_alignment, counts.num_rows))


def make_planner(spec: TransportSpec, device: torch.device) -> Planner:
    """The planner for a device."""
    return KernelPlanner(spec, device) if device.type == "cuda" else PlainPlanner(spec, device)
