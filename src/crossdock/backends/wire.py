"""Dispatch and combine as staged exchanges over any wire that can swap rows between ranks.

One fixed-size message opens every operation: the fingerprint, then (in dispatch) counts and what is wrong with the ids,
(elsewhere) what the layout says of the two ranks' rows, so that no exchange begins whose sides expect other sizes.
Rows cross the wire once per rank that wants them, and the expert side spreads them over its experts' rows. Going home,
`fast` adds up every token's rows where they are and sends one row per token and rank; `exact` sends every slot's row.

A rank's own rows never touch the wire. Tables of rows that came from ranks hold the other ranks in ascending order and
this rank last ("table order"), so that one slice of the table is what the wire fills.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..errors import ContractViolation
from ..group.fingerprint import NUM_WORDS
from ..inputs import refuse_bad_ids
from ..permute import take_or_zero
from ..row_memory import RowMemory
from ..rows import gather_gradient, gather_rows, poisoned, reduce_rows
from .base import Call, Demand, Layout, NewSize, Received, Traffic, Transport, TransportSpec, Weights
from .wire_layout import BAD_IDS, COUNTS, Counts, Sent, WireLayout, dropped_behind, make_planner

Finish = Callable[[], None]  # waits until a started swap has filled its output
_HIGH = 1 << 32  # two counts in one word of a header


def nothing() -> None:
    """A `Finish` with nothing to wait for."""


def _told(sent: int, arrived: int, slots_sent: int, slots_arrived: int) -> tuple[int, int]:
    """A column of `WireLayout.splits` in two words: what leaves for a rank, and what comes from it.

    What it tells of itself is the same the other way round.
    """
    return sent + slots_sent * _HIGH, arrived + slots_arrived * _HIGH


class Wire(ABC):
    """Swaps tensors between the ranks of one opening. Raises `TransportFault` when a peer does not take part.

    `given_up` is a flag `[1]` int64 on the device that turns results into NaN once a call was given up; None where a
    swap that fails raises at once.
    """

    given_up: torch.Tensor | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def swap_headers(self, headers: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Row q of `headers [size, W]` int64 goes to rank q; returns what left and what came, by rank, on the CPU."""

    def open_call(self, headers: torch.Tensor, call: Call) -> Finish:
        """Begin to open an operation whose sizes are known; the returned function compares every rank's fingerprint.

        It is called before any row moves. Wires on which a wrong size does no harm may compare later instead.
        """
        came = self.swap_headers(headers, call)[1]
        return lambda: call.verify(came.tolist())

    @abstractmethod
    def start(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Finish:
        """Send `leaving[q]` rows to rank q in rank order, and fill `out` with `arriving[q]` from rank q.

        Neither tensor may be touched before the returned function was called.
        """

    def abandon(self) -> None:
        """Wake the ranks that wait for this one, if that is possible; nothing else is swapped after it."""

    def close(self) -> None:
        """Drop the links."""


class WireTransport(Transport):
    """All of `Transport` over one `Wire`."""

    def __init__(self, spec: TransportSpec, wire: Wire, device: torch.device) -> None:
        self.spec, self.wire, self.device = spec, wire, device
        self.planner = make_planner(spec, device)
        self._memory = RowMemory()
        self._may_drop = spec.row_capacity.kind != "exact"
        self._has_empty_rows = spec.expert_alignment > 1 or self._may_drop  # of padding, and behind the last expert's
        self._layer, self._sent_rows_bytes = "", dict[str, int]()  # of the operation that is under way; by layer
        self._sent_other_bytes = self._host_syncs = 0

    # -- the operations ----------------------------------------------------------------------------------------------

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        headers = self._headers(call)
        self.planner.count(expert_ids, headers)
        counts = self._swap_counts(headers, call)
        sent = self.planner.place_sent(expert_ids, headers, counts)
        slots = torch.cat([expert_ids.to(torch.int32), scores.contiguous().view(torch.int32)], dim=1)
        arrived_slots, finish_slots = self._start_table(
            slots, sent.token_of_sent, counts.sent, counts.arrived, rows=False
        )
        table, finish_rows = self._start_table(x, sent.token_of_sent, counts.sent, counts.arrived)
        finish_slots()
        arrived = self.planner.place_arrived(arrived_slots, counts)
        home_of_slot, row_of_home = self.planner.place_home(expert_ids, arrived, counts)
        wanted = arrived.tokens_per_expert
        if num_rows is not None:
            arrived, row_of_home = arrived.fitted(num_rows), dropped_behind(row_of_home, num_rows)
        finish_rows()
        if num_rows is not None and self.spec.reduction == "exact":
            home_of_slot = torch.where(self._are_kept(arrived.row_of_slot, sent, counts), home_of_slot, -1)
        layout = WireLayout(*sent, arrived.row_of_slot, arrived.slot_of_row, counts.splits(), home_of_slot, row_of_home)
        return Received(
            rows=self._spread(table, arrived.slot_of_row),
            row_scores=arrived.row_scores,
            tokens_per_expert=arrived.tokens_per_expert,
            expert_offsets=arrived.expert_offsets,
            layout=list(layout),
            demand=Demand(wanted, wanted.new_zeros(self.spec.ep_size)),  # bad ids were refused
        )

    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        there = WireLayout(*layout)
        opened = self._open(call, there)
        sent, arrived, _, _ = there.splits.tolist()
        table, finish = self._start_table(x, there.token_of_sent, sent, arrived, opened=opened)
        finish()
        return self._spread(table, there.slot_of_row)

    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        there = WireLayout(*layout)
        return self._start_rows_home(rows, weights, there, self._open(call, there))()

    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        there = WireLayout(*layout)
        return self._start_scalars(values, there, nothing if call is None else self._open(call, there))()

    def combine_backward(
        self, grad_out: torch.Tensor, rows: torch.Tensor, row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        there = WireLayout(*layout)
        opened = self._open(call, there)
        sent, arrived, _, _ = there.splits.tolist()
        table, finish = self._start_table(grad_out, there.token_of_sent, sent, arrived, opened=opened)
        finish()
        grad_rows, grad_row_scores = gather_gradient(
            table,
            there.slot_of_row,
            rows=rows,
            row_scores=row_scores,
            divisor=self.spec.top_k,
            may_be_absent=self._has_empty_rows,
            nan_if=self.wire.given_up,
            new=self._memory.new_rows,
        )
        return grad_rows, self.scalars_home(grad_row_scores, layout, None)

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scalars travel while rows do."""
        there = WireLayout(*layout)
        finish_rows = self._start_rows_home(grad_rows, None, there, self._open(call, there))
        finish_scalars = self._start_scalars(grad_row_scores, there)
        return finish_rows(), finish_scalars()

    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        top_k, ep_size, exact = self.spec.top_k, self.spec.ep_size, self.spec.reduction == "exact"
        num_sent, num_arrived = new_size(), new_size()
        num_home = new_size() if exact else 0

        def empty(*shape: int | torch.SymInt) -> torch.Tensor:
            return like.new_empty(shape, dtype=torch.int64)

        layout = WireLayout(
            token_of_sent=empty(num_sent),
            sent_of_token=empty(num_tokens, ep_size),
            sent_slot_of_slot=empty(num_tokens, top_k),
            row_of_slot=empty(num_arrived, top_k),
            slot_of_row=empty(num_rows),
            splits=torch.empty(4, ep_size, dtype=torch.int64, device="cpu"),
            home_of_slot=empty(num_tokens if exact else 0, top_k),
            row_of_home=empty(num_home),
        )
        return list(layout)

    def agree_max(self, value: int, call: Call) -> int:
        headers = self._headers(call)
        headers[:, BAD_IDS] = value  # any word behind the fingerprint
        came = self.wire.swap_headers(headers, call)[1]
        self._host_syncs += 1
        call.verify(came.tolist())
        return int(came[:, BAD_IDS].max())

    @property
    def reads_slot_scores(self) -> bool:
        return self.spec.reduction == "exact"

    def fault_flag(self) -> torch.Tensor | None:
        return self.wire.given_up

    def abandon(self) -> None:
        self.wire.abandon()

    def sent(self) -> Traffic:
        counts = torch.tensor(list(self._sent_rows_bytes.values()), dtype=torch.int64, device="cpu")
        return Traffic(tuple(self._sent_rows_bytes), counts, self._sent_other_bytes)

    def num_host_syncs(self) -> int:
        return self._host_syncs

    def close(self) -> None:
        self.wire.close()
        self._memory.close()

    # -- opening a call ----------------------------------------------------------------------------------------------

    def _headers(self, call: Call, of_ranks: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """`[ep_size, W]` int64: the fingerprint, two words for each rank, then zeros for what dispatch has to tell."""
        zeros = [0] * self.spec.num_local_experts
        words = [[*call.words, *pair, *zeros] for pair in of_ranks or [(0, 0)] * self.spec.ep_size]
        self._layer = call.facts.layer
        self._sent_other_bytes += (self.spec.ep_size - 1) * len(words[0]) * torch.int64.itemsize
        on_host = torch.tensor(words, device="cpu", pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def _open(self, call: Call, there: WireLayout) -> Finish:
        """Begin to open an operation along a layout; every rank's fingerprint and sizes are compared."""
        splits = there.splits.t().tolist()

        def verify(came: Sequence[Sequence[int]]) -> None:
            call.verify(came)
            for rank, (words, sizes) in enumerate(zip(came, splits, strict=True)):
                if tuple(words[NUM_WORDS:COUNTS]) != _told(*sizes)[::-1]:
                    self._refuse_sizes(rank, sizes, call)

        headers = self._headers(call, [_told(*sizes) for sizes in splits])
        return self.wire.open_call(headers, call._replace(verify=verify))

    def _refuse_sizes(self, rank: int, sizes: Sequence[int], call: Call) -> None:
        sent, arrived, slots_sent, slots_arrived = sizes
        pair = sorted((self.spec.rank, rank))
        raise ContractViolation(
            f"ranks {pair} hold layouts that do not fit each other in {call.facts}: rank {self.spec.rank} has {sent}"
            f" token rows ({slots_sent} slots) for rank {rank} and {arrived} ({slots_arrived}) from it, rank {rank} has"
            " other numbers; the tensors of a handle, or what autograd has saved of them, have been changed",
            pair,
        )

    def _swap_counts(self, headers: torch.Tensor, call: Call) -> Counts:
        """The one host synchronisation."""
        left, came = self.wire.swap_headers(headers, call)
        self._host_syncs += 1
        call.verify(came.tolist())
        refuse_bad_ids(came[:, BAD_IDS].tolist(), self.spec.num_experts)
        return Counts.read(left, came, self.spec.expert_alignment)

    def _are_kept(self, row_of_slot: torch.Tensor, sent: Sent, counts: Counts) -> torch.Tensor:
        """`[T, top_k]` bool: the slots of this rank that have a row, which only the experts' ranks know."""
        has_row = (row_of_slot >= 0).to(torch.uint8)

        def kept(part: slice, out: torch.Tensor | None) -> torch.Tensor:
            return has_row[part] if out is None else out.copy_(has_row[part])

        home, finish = self._start_home(kept, counts.sent, counts.arrived, rows=False)
        finish()
        return take_or_zero(home.reshape(-1), sent.sent_slot_of_slot) > 0

    # -- the movements -----------------------------------------------------------------------------------------------

    def _start_table(
        self,
        x: torch.Tensor,
        token_of_sent: torch.Tensor,
        sent: list[int],
        arrived: list[int],
        *,
        rows: bool = True,
        opened: Finish = nothing,
    ) -> tuple[torch.Tensor, Finish]:
        """`[A, ...]`: what the other ranks send, in rank order, then this rank's own rows, which are there at once."""
        num_away = sum(sent) - sent[self.spec.rank]
        table, new = self._memory.new_rows(sum(arrived), x), self._memory.new_rows
        away = gather_rows(x, token_of_sent[:num_away], may_be_absent=False, new=new)
        opened()
        finish = self._start(table, away, arrived, sent, rows)
        own = table[table.shape[0] - arrived[self.spec.rank] :]
        gather_rows(x, token_of_sent[num_away:], may_be_absent=False, out=own)
        return table, finish

    def _start_rows_home(
        self, rows: torch.Tensor, weights: Weights | None, there: WireLayout, opened: Finish
    ) -> Callable[[], torch.Tensor]:
        """Start to bring rows home; the returned function waits for them and adds them up."""
        sent, arrived, slots_sent, slots_arrived = there.splits.tolist()
        new = self._memory.new_rows
        if self.spec.reduction == "exact":

            def going(part: slice, out: torch.Tensor | None) -> torch.Tensor:
                return gather_rows(rows, there.row_of_home[part], may_be_absent=self._may_drop, out=out, new=new)

            home, finish = self._start_home(going, slots_sent, slots_arrived, opened=opened)
            index, by_slot = there.home_of_slot, None if weights is None else weights.of_slots
        else:
            by_row = None if weights is None else weights.of_rows

            def partial(part: slice, out: torch.Tensor | None) -> torch.Tensor:
                return reduce_rows(rows, there.row_of_slot[part], by_row, out=out, new=new)

            home, finish = self._start_home(partial, sent, arrived, opened=opened)
            index, by_slot = there.sent_of_token, None

        def add_up() -> torch.Tensor:
            finish()
            return reduce_rows(home, index, by_slot, nan_if=self.wire.given_up, new=new)

        return add_up

    def _start_scalars(
        self, values: torch.Tensor, there: WireLayout, opened: Finish = nothing
    ) -> Callable[[], torch.Tensor]:
        """Start to bring one scalar a slot home; the returned function waits for them."""
        sent, arrived, _, _ = there.splits.tolist()

        def by_slot(part: slice, out: torch.Tensor | None) -> torch.Tensor:
            scalars = take_or_zero(values, there.row_of_slot[part])
            return scalars if out is None else out.copy_(scalars)

        home, finish = self._start_home(by_slot, sent, arrived, rows=False, opened=opened)

        def take() -> torch.Tensor:
            finish()
            scalars = take_or_zero(home.reshape(-1), there.sent_slot_of_slot)
            return scalars if self.wire.given_up is None else poisoned(scalars, self.wire.given_up)

        return take

    def _start_home(
        self,
        make: Callable[[slice, torch.Tensor | None], torch.Tensor],
        coming: list[int],
        going: list[int],
        *,
        rows: bool = True,
        opened: Finish = nothing,
    ) -> tuple[torch.Tensor, Finish]:
        """`[sum(coming), ...]`: rows back at the ranks they came for, in table order there.

        `make` works out a part of what goes home, in table order, in memory of its own or where it is told: first what
        travels, then, meanwhile, this rank's own.
        """
        num_away = sum(going) - going[self.spec.rank]
        away = make(slice(num_away), None)
        home = self._memory.new_rows(sum(coming), away)
        opened()
        finish = self._start(home, away, coming, going, rows)

        def finish_all() -> None:
            make(slice(num_away, None), home[home.shape[0] - coming[self.spec.rank] :])
            finish()

        return home, finish_all

    def _start(
        self, table: torch.Tensor, away: torch.Tensor, arriving: list[int], leaving: list[int], rows: bool
    ) -> Finish:
        num_bytes = away.numel() * away.element_size()
        if rows:
            self._sent_rows_bytes[self._layer] = self._sent_rows_bytes.get(self._layer, 0) + num_bytes
        else:
            self._sent_other_bytes += num_bytes
        arriving, leaving = [*arriving], [*leaving]
        arriving[self.spec.rank] = leaving[self.spec.rank] = 0
        return self.wire.start(table[: sum(arriving)], away, arriving, leaving)

    def _spread(self, table: torch.Tensor, slot_of_row: torch.Tensor) -> torch.Tensor:
        return gather_rows(
            table,
            slot_of_row,
            divisor=self.spec.top_k,
            may_be_absent=self._has_empty_rows,
            nan_if=self.wire.given_up,
            new=self._memory.new_rows,
        )
