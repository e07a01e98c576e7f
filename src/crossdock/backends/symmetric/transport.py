"""Dispatch and combine through memory that all ranks see: every rank pushes to where whoever wants something reads it.

A dispatch pushes its routing to every rank, and each of its rows once to every rank that wants it, into a staging
buffer. Meanwhile every rank works out for itself, from all ranks' ids, where rows go among those of its experts, and
spreads what has come. A combine pushes from the experts' rank what each source rank's tokens get from it, and their
rank adds that up: one share a rank in `fast`, one slot after the other in `exact`. Where batches are small and
capacities known, one kernel does a whole dispatch or `fast` combine (`kernels/small.py`); the bits are the same.

Rows are pushed from where they are, so nothing is copied of an ordinary `x` either; what `input_buffer` gives is memory
that a producer may fill again in every step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ...inputs import refuse_bad_ids
from ...kernels.arrange import Groups, Routed
from ...kernels.combine import Routes, launch_combine, launch_combine_slot
from ...kernels.dispatch import Moving, Scores, Sizes, launch_count, launch_dispatch, launch_place
from ...kernels.move import Moves, launch_move_rows, launch_push_rows, launch_spread_rows
from ...kernels.publish import Opening, Routing, launch_publish_routing
from ...kernels.push import Staging
from ...kernels.scalars import Scalars, Slips, launch_swap_scalars
from ...kernels.signal import GIVEN_UP, READ, ROUTED, TOKENS
from ...kernels.small import Inbox, inbox_groups
from ...kernels.small_combine import launch_combine_small
from ...kernels.small_dispatch import SmallGroups, launch_dispatch_small
from ...kernels.waits import launch_tell, launch_wait
from ...kernels.weigh import Weighed, launch_weigh_rows
from ...layer_counters import LayerCounters
from ...memory.workspace import Workspace, most_bytes
from ...rows import new_rows
from ..base import Call, Demand, Layout, Link, NewSize, Received, Traffic, Transport, TransportSpec, Weights
from .buffers import buffers_of, inbox_buffers, refuse_too_large
from .plan import Plan
from .rounds import Rounds


class SymmetricLayout(NamedTuple):
    """Where every row of one dispatch goes, from both ends. T tokens here, S the most tokens of a rank, R rows.

    Attributes:
        row_of_slot: `[ep_size, S, top_k]` int32: the row here of every rank's slots; -1 elsewhere, -2 dropped.
        padding: `[2, e]` int64: where each local expert's padding begins and ends.
        home_of_slot: `[T, top_k]` int32: the rank that has each of this rank's slots; -1 without an expert.
        num_sent: `[1]` int64: rows that other ranks get from here.
        extent: `[R, 0]`: nothing but R, which no other of these has.
    """

    row_of_slot: torch.Tensor
    padding: torch.Tensor
    home_of_slot: torch.Tensor
    num_sent: torch.Tensor
    extent: torch.Tensor


class _Dispatched(NamedTuple):
    """What the general kernels bring: rows, both their scores, the groups, and where these end if it was asked for."""

    rows: torch.Tensor
    both_scores: Scores
    groups: Groups
    rows_end: torch.Tensor | None


class SymmetricTransport(Transport):
    """All of `Transport` over one `Workspace`. Opening is collective.

    Raises:
        BackendUnavailable: more than the memory holds; also see `Workspace.open`.
        TransportFault: see there.
    """

    def __init__(self, spec: TransportSpec, link: Link, device: torch.device) -> None:
        self.spec, self.device = spec, device
        refuse_too_large(spec, most_bytes(device, spec.ep_size))
        self.workspace = Workspace.open(buffers_of(spec), link.members, device, link.store_prefix, spec.timeout_s)
        self.rounds = Rounds(spec, self.workspace, device, link.on_expiry)
        self.plan = Plan.of(spec, device)
        self._inbox = self._new_inbox()
        self._staging = Staging(self.workspace.own["staging"], self.workspace.table["staging"], self.plan.chunk_len)
        self._slips = Slips(self.workspace.own["slips"], self.workspace.table["slips"])
        self._host_syncs = 0
        self._sent_rows = LayerCounters(1, device)
        self._sent_other_bytes = 0

    # -- the operations ----------------------------------------------------------------------------------------------

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        board, opening = self.rounds.board, self.rounds.open(call)
        x = x if x.stride(1) == 1 else x.contiguous()
        self._count_other(expert_ids.numel() * (4 + 4))
        inbox = self._small_inbox
        if inbox is not None and num_rows is not None:
            return self._dispatch_small(opening, inbox, x, scores, expert_ids, num_rows, call)
        routing, moves, routed = self._opened(x, scores, expert_ids, call)
        with self.rounds.waiting():
            if board.fused:
                dispatched = self._dispatch_fused(opening, routing, routed, moves, num_rows, call)
            else:
                dispatched = self._dispatch_in_steps(opening, routing, routed, moves, num_rows)
        return _received(*dispatched, routing.home_of_slot, routing.num_sent)

    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        there, opening = SymmetricLayout(*layout), self.rounds.open(call)
        self._count_other(0)
        moves, rows = self._moves(x if x.stride(1) == 1 else x.contiguous(), there.home_of_slot), self._rows_of(there)
        sent = (there.num_sent, self._sent_by(call))
        with self.rounds.waiting():
            launch_move_rows(self.rounds.board, opening, moves, there.row_of_slot, there.padding, rows, *sent)
        return rows

    def combine_backward(
        self, grad_out: torch.Tensor, rows: torch.Tensor, row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """On a GPU, where there is much to move, gradients are weighed on their way (see `kernels/weigh.py`)."""
        # With few programs it takes four times as long as a movement and a pass over rows that lie here.
        if self._small_inbox is not None or self.spec.num_sms is not None or not self.rounds.board.fused:
            return super().combine_backward(grad_out, rows, row_scores, layout, call)
        there, opening, weigh = SymmetricLayout(*layout), self.rounds.open(call), self.plan.weigh
        self._count_other(0)
        moves = self._moves(grad_out if grad_out.stride(1) == 1 else grad_out.contiguous(), there.home_of_slot)
        parts = row_scores.new_empty(-(-self.spec.hidden_dim // weigh.cols), row_scores.shape[0])
        weighed = Weighed(rows.contiguous(), row_scores, self._rows_of(there), parts)
        with self.rounds.waiting():
            grad_row_scores = launch_weigh_rows(
                self.rounds.board, opening, moves, weighed, weigh, there.row_of_slot, there.padding, there.num_sent,
                self._sent_by(call),
            )  # fmt: skip
        return weighed.out, self.scalars_home(grad_row_scores, layout, None)

    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        there, opening = SymmetricLayout(*layout), self.rounds.open(call)
        self._count_other(0)
        if self.spec.reduction == "fast":
            of_rows = None if weights is None else weights.of_rows
            return self._combine_fast(opening, rows, of_rows, self._routes(there, call), None)
        routes = self._routes(there, call)
        out, board = new_rows(there.home_of_slot.shape[0], rows), self.rounds.board
        give, take = self.plan.give, self.plan.take
        by_slot = None if weights is None else weights.of_slots
        sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        with self.rounds.waiting():
            for slot in range(self.spec.top_k):
                launch_combine_slot(board, opening, self._staging, routes, rows, by_slot, slot, sums, out, give, take)
        return out

    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        there = SymmetricLayout(*layout)
        opening = self.rounds.last_opening if call is None else self.rounds.open(call)
        self._count_other(there.home_of_slot.numel() * 4)
        with self.rounds.waiting():
            return launch_swap_scalars(
                self.rounds.board,
                opening,
                self._slips,
                values,
                there.row_of_slot,
                there.home_of_slot,
                self.plan.others,
            )

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With `fast` both come home in one round; `exact` brings the scalars in a round behind those of the rows."""
        if self.spec.reduction != "fast":
            return super().dispatch_backward(grad_rows, grad_row_scores, layout, call)
        there, opening = SymmetricLayout(*layout), self.rounds.open(call)
        self._count_other(there.home_of_slot.numel() * 4)
        grad_scores = torch.empty(there.home_of_slot.shape, dtype=torch.float32, device=self.device)
        scalars = Scalars(grad_row_scores, grad_scores, self._slips)
        return self._combine_fast(opening, grad_rows, None, self._routes(there, call), scalars), grad_scores

    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        top_k, ep_size = self.spec.top_k, self.spec.ep_size
        layout = SymmetricLayout(
            row_of_slot=like.new_empty((ep_size, new_size(), top_k), dtype=torch.int32),
            padding=like.new_empty((2, self.spec.num_local_experts), dtype=torch.int64),
            home_of_slot=like.new_empty((num_tokens, top_k), dtype=torch.int32),
            num_sent=like.new_empty((1,), dtype=torch.int64),
            extent=like.new_empty((num_rows, 0)),
        )
        return list(layout)

    def agree_max(self, value: int, call: Call) -> int:
        """A round of its own: what all ranks tell is a number of tokens like any other."""
        board, opening = self.rounds.board, self.rounds.last_opening
        with self.rounds.waiting():
            launch_wait(board, READ, opening.digest)
            launch_tell(board, ROUTED, opening.digest, num_tokens=value)
            launch_wait(board, ROUTED, opening.digest)
            values = board.signals[TOKENS : TOKENS + 2, :].tolist()
            number = int(board.state[0])
            launch_tell(board, READ, opening.digest)
        self._host_syncs += 1
        self.rounds.look()
        return int(max(values[number % 2]))

    def input_buffer(self, num_tokens: int) -> torch.Tensor:
        buffer = self.workspace.own["input"]
        increment_version(buffer)  # what autograd has saved of an earlier view is about to be overwritten
        return buffer[:num_tokens].detach()

    def look(self) -> None:
        self.rounds.look()

    @property
    def reads_slot_scores(self) -> bool:
        return self.spec.reduction == "exact"

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes

    def fault_flag(self) -> torch.Tensor | None:
        return self.rounds.board.state[GIVEN_UP : GIVEN_UP + 1]

    def abandon(self) -> None:
        self.rounds.leave()

    def sent(self) -> Traffic:
        """Rows are those that other ranks get; headers, routing and scalars count as if every other rank got all."""
        rows = self._sent_rows.words().flatten()
        row_bytes = self.spec.hidden_dim * self.spec.dtype.itemsize
        return Traffic(self._sent_rows.layers, rows * row_bytes, self._sent_other_bytes)

    def num_host_syncs(self) -> int:
        return self._host_syncs

    def close(self) -> None:
        self.rounds.close()
        self._inbox = None  # it shows the workspace
        del self._staging, self._slips
        self.workspace.close()

    # -- parts of them -----------------------------------------------------------------------------------------------

    def _new_inbox(self) -> Inbox | None:
        spec, own, table = self.spec, self.workspace.own, self.workspace.table
        names = [buffer.name for buffer in inbox_buffers(spec)]
        if not names:
            return None
        rows, places, scores, counts = (own[name] for name in names)
        tables = torch.stack([table[name] for name in names])
        groups = inbox_groups(self.device, max(1, self.plan.small), spec.num_local_experts, spec.ep_size)
        return Inbox(rows, places, scores, counts, tables, groups)

    @property
    def _small_inbox(self) -> Inbox | None:
        """Of the kernels for small batches, where these serve."""
        return self._inbox if self.plan.small else None

    def _dispatch_small(
        self,
        opening: Opening,
        inbox: Inbox,
        x: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        num_rows: int,
        call: Call,
    ) -> Received:
        rows, spec = new_rows(num_rows, inbox.rows[0, 0]), self.spec
        with self.rounds.waiting():
            rows_end = None if call.account is None else torch.empty(1, dtype=torch.int64, device=self.device)
            groups, both_scores = launch_dispatch_small(
                self.rounds.board, opening, inbox, x, scores, expert_ids, self._sent_by(call), self._bound(call),
                spec.expert_alignment, spec.num_experts, rows, call.account, rows_end,
            )  # fmt: skip
        return _received(rows, both_scores, groups, rows_end, groups.home_of_slot, groups.num_sent)

    def _combine_fast(
        self,
        opening: Opening,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        routes: Routes,
        scalars: Scalars | None,
    ) -> torch.Tensor:
        """Rows `[R, D]`, with weights by row or None, added up at home, `[T, D]`; scalars ride along."""
        out, board, plan = new_rows(routes.home_of_slot.shape[0], rows), self.rounds.board, self.plan
        with self.rounds.waiting():
            if (inbox := self._small_inbox) is not None:
                launch_combine_small(board, opening, inbox, rows, weights, *routes, out, scalars)
            else:
                launch_combine(board, opening, self._staging, routes, rows, weights, out, plan.give, plan.take, scalars)
        return out

    def _routes(self, there: SymmetricLayout, call: Call) -> Routes:
        return Routes(there.row_of_slot, there.home_of_slot, self._sent_by(call))

    def _sent_by(self, call: Call) -> torch.Tensor:
        """`[1]` int64: where the rows are counted that a call's layer sends to other ranks."""
        return self._sent_rows.of(call.facts.layer)[1]

    def _bound(self, call: Call) -> int:
        """S: what this rank knows of every rank's T without asking."""
        facts = call.facts
        told = facts.num_tokens_per_rank if facts.num_tokens_per_rank >= 0 else facts.num_tokens
        return self.spec.num_max_tokens_per_rank if told < 0 else told

    def _moves(self, x: torch.Tensor, home_of_slot: torch.Tensor) -> Moves:
        return Moves(x, home_of_slot, self._staging, self.plan.push, self.plan.spread, self.spec.expert_alignment > 1)

    def _rows_of(self, layout: SymmetricLayout) -> torch.Tensor:
        return new_rows(layout.extent.shape[0], self._staging.own[0])

    def _opened(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, call: Call
    ) -> tuple[Routing, Moves, Routed]:
        """What this rank publishes, what it moves, and where all ranks' routing comes to."""
        own, table, spec = self.workspace.own, self.workspace.table, self.spec
        home_of_slot = torch.empty(expert_ids.shape, dtype=torch.int32, device=self.device)
        num_sent = torch.empty(1, dtype=torch.int64, device=self.device)
        routing = Routing(
            expert_ids, scores, table["ids"], table["scores"], spec.num_max_tokens_per_rank, spec.num_experts,
            self._sent_by(call), home_of_slot, num_sent,
        )  # fmt: skip
        return routing, self._moves(x, home_of_slot), Routed(own["ids"], own["scores"], self._bound(call))

    def _dispatch_fused(
        self, opening: Opening, routing: Routing, routed: Routed, moves: Moves, num_rows: int | None, call: Call
    ) -> _Dispatched:
        """On a GPU one launch does it all; where the host has to know how many rows come, two."""
        board, sizes = self.rounds.board, self._sizes
        if num_rows is not None:
            rows_end = None if call.account is None else torch.empty(1, dtype=torch.int64, device=self.device)
            moving = Moving(moves, new_rows(num_rows, self._staging.own[0]), call.account, rows_end)
            groups, both_scores = launch_dispatch(board, opening, routing, routed, sizes, moving)
            return _Dispatched(moving.out, both_scores, groups, rows_end)
        groups = launch_count(board, opening, routing, routed, sizes, None)
        moving = Moving(moves, new_rows(self._await_counts(groups, opening), self._staging.own[0]))
        both_scores = launch_place(board, opening, routing, routed, groups, sizes, moving.out.shape[0], moving)
        return _Dispatched(moving.out, both_scores, groups, None)

    def _dispatch_in_steps(
        self, opening: Opening, routing: Routing, routed: Routed, moves: Moves, num_rows: int | None
    ) -> _Dispatched:
        """In the interpreter."""
        board, sizes = self.rounds.board, self._sizes
        launch_publish_routing(board, opening, routing)
        launch_push_rows(board, opening, moves, routing.num_sent)
        groups = launch_count(board, opening, routing, routed, sizes, num_rows)
        if num_rows is None:
            num_rows = self._await_counts(groups, opening)
        both_scores = launch_place(board, opening, routing, routed, groups, sizes, num_rows)
        rows = new_rows(num_rows, self._staging.own[0])
        launch_spread_rows(board, opening, moves, groups.row_of_slot, groups.padding, rows)
        return _Dispatched(rows, both_scores, groups, None)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.spec.expert_alignment, self.spec.num_local_experts, self.plan.arrangers)

    def _await_counts(self, groups: Groups, opening: Opening) -> int:
        """Rows to make room for; the one host synchronisation."""
        counted = torch.cat([groups.report[:1], groups.bad_ids]).tolist()
        self._host_syncs += 1
        self.rounds.look()
        num_rows, *num_bad = counted
        if any(num_bad):
            launch_tell(self.rounds.board, READ, opening.digest)  # refused by all ranks alike: the next call may come
            refuse_bad_ids(num_bad, self.spec.num_experts)
        return int(num_rows)

    def _count_other(self, num_bytes: int) -> None:
        self._sent_other_bytes += (self.spec.ep_size - 1) * num_bytes


def _received(
    rows: torch.Tensor,
    both_scores: Scores,
    groups: Groups | SmallGroups,
    rows_end: torch.Tensor | None,
    home_of_slot: torch.Tensor,
    num_sent: torch.Tensor,
) -> Received:
    """What a dispatch brings; of both scores the first is the caller's."""
    row_scores, kept_scores = both_scores
    extent = rows.new_empty(rows.shape[0], 0)
    layout = SymmetricLayout(groups.row_of_slot, groups.padding, home_of_slot, num_sent, extent)
    return Received(
        rows=rows,
        row_scores=row_scores,
        tokens_per_expert=groups.tokens_per_expert,
        expert_offsets=groups.expert_offsets,
        layout=list(layout),
        demand=Demand(groups.wanted, groups.bad_ids),
        kept_scores=kept_scores,
        rows_end=rows_end,
    )
