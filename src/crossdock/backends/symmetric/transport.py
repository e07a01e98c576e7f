"""Dispatch and combine through memory that all ranks see: every rank lays out, and whoever wants something reads it.

A dispatch publishes rows and routing. Every rank works out for itself, from all ranks' ids, where rows go among those
of its experts, and pulls each row once. A combine lays out at the experts' rank what each source rank's tokens get from
it, and their rank pulls and adds up: one share a rank in `fast`, one slot after the other in `exact`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...group.fingerprint import NUM_WORDS
from ...inputs import refuse_bad_ids
from ...kernels.add_home import launch_add_ranks, launch_add_slot
from ...kernels.arrange import Groups, Published, launch_count_published, launch_place_published
from ...kernels.poison import launch_poison
from ...kernels.pre_add import launch_pre_add
from ...kernels.publish import Shelf, launch_publish
from ...kernels.pull import launch_pull_rows, launch_zero_padding
from ...kernels.scalars import launch_fetch_scalars, launch_lay_out_scalars
from ...memory.workspace import BufferSpec, Workspace, place_buffers
from ...rows import new_rows
from ..base import Call, Layout, Link, NewSize, Received, Transport, TransportSpec, Weights
from .headers import HEADER_WORDS, TOKENS, Headers, headers_spec
from .rounds import Rounds, signals_spec

_NO_LIMIT = 2**31 - 1  # rows: `exact` takes as many as come


class SymmetricLayout(NamedTuple):
    """Where every row of one dispatch goes, from both ends. T tokens here, S the most tokens of a rank, R rows.

    Attributes:
        row_of_slot: `[ep_size, S, top_k]` int32: the row here of every rank's slots; -1 elsewhere, -2 dropped.
        padding: `[2, e]` int64: where each local expert's padding begins and ends.
        home_of_slot: `[T, top_k]` int32: the rank that has each of this rank's slots; -1 without an expert.
        extent: `[R, 0]`: nothing but R, which no other of these has.
    """

    row_of_slot: torch.Tensor
    padding: torch.Tensor
    home_of_slot: torch.Tensor
    extent: torch.Tensor


class _Counted(NamedTuple):
    """What the host knows of a dispatch after its one synchronisation."""

    num_tokens: list[int]
    num_bad: list[int]
    num_rows: int


def buffers_of(spec: TransportSpec) -> list[BufferSpec]:
    """All shared buffers of one rank, sized by `num_max_tokens_per_rank`."""
    tokens, top_k = spec.num_max_tokens_per_rank, spec.top_k
    return [
        signals_spec(spec.ep_size),
        headers_spec(),
        BufferSpec("rows", (tokens, spec.hidden_dim), spec.dtype),
        BufferSpec("ids", (tokens, top_k), torch.int32),
        BufferSpec("scores", (tokens, top_k), torch.float32),
        BufferSpec("partials", (spec.ep_size, tokens, spec.hidden_dim), spec.dtype),
        BufferSpec("scalars", (spec.ep_size, tokens, top_k), torch.float32),
    ]


def workspace_bytes(spec: TransportSpec) -> int:
    """Bytes of shared memory that one rank allocates when a dispatcher of this spec is opened, and no more later."""
    return place_buffers(buffers_of(spec))[1]


class SymmetricTransport(Transport):
    """All of `Transport` over one `Workspace`. Opening is collective.

    Raises:
        BackendUnavailable, TransportFault: see `Workspace.open`.
    """

    def __init__(self, spec: TransportSpec, link: Link, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.workspace = Workspace.open(buffers_of(spec), link.members, device, link.store_prefix, spec.timeout_s)
        self.rounds = Rounds(spec, self.workspace, device, link.on_expiry)
        self.headers = Headers(self.workspace, self.rounds, device)
        self._host_syncs = 0
        self._sent_rows = torch.zeros(1, dtype=torch.int64, device=device)  # counted by the kernels that lay them out
        self._sent_other_bytes = 0

    # -- the operations ----------------------------------------------------------------------------------------------

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, call: Call) -> Received:
        spec = self.spec
        home_of_slot = self._publish(x, (expert_ids, scores), call)
        self._count_other(expert_ids.numel() * (4 + 4))
        published, groups, counted = self._count(call)
        if any(counted.num_bad):
            self.rounds.finish_reading()  # refused by all ranks alike, and the next call may come
            refuse_bad_ids(counted.num_bad, spec.num_experts)
        row_of_slot, row_scores = launch_place_published(
            published,
            groups,
            spec.rank * spec.num_local_experts,
            spec.expert_alignment,
            max(counted.num_tokens),
            counted.num_rows,
        )
        layout = SymmetricLayout(row_of_slot, groups.padding, home_of_slot, x.new_empty(counted.num_rows, 0))
        return Received(
            rows=self._pull(layout),
            row_scores=self._poisoned(row_scores),
            tokens_per_expert=groups.tokens_per_expert,
            expert_offsets=groups.expert_offsets,
            layout=list(layout),
        )

    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        there = SymmetricLayout(*layout)
        self._publish(x, there.home_of_slot, call)
        self.headers.compare(call)
        return self._pull(there)

    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        there, rounds = SymmetricLayout(*layout), self.rounds
        out = new_rows(there.home_of_slot.shape[0], rows)
        if self.spec.reduction == "exact":
            self._add_slots(rows, None if weights is None else weights.of_slots, there, call, out)
            return self._poisoned(out)
        self._lay_out_partials(rows, None if weights is None else weights.of_rows, there, range(self.spec.top_k), call)
        launch_add_ranks(*self._partials_for(there), out)
        rounds.finish_reading()
        return self._poisoned(out)

    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        there = SymmetricLayout(*layout)
        header = self.headers.write(call)
        self.rounds.await_free("scalars", call)
        launch_lay_out_scalars(values, there.row_of_slot, self.workspace.own["scalars"], header)
        self.rounds.publish("scalars")
        self._count_other(there.row_of_slot[0].numel() * 4)
        self.rounds.await_published(call)
        self.headers.compare(call)
        table, max_tokens = self.workspace.table["scalars"], self.spec.num_max_tokens_per_rank
        out = launch_fetch_scalars(table, there.home_of_slot, self.spec.rank, max_tokens)
        self.rounds.finish_reading()
        return self._poisoned(out)

    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        top_k, ep_size = self.spec.top_k, self.spec.ep_size
        layout = SymmetricLayout(
            row_of_slot=like.new_empty((ep_size, new_size(), top_k), dtype=torch.int32),
            padding=like.new_empty((2, self.spec.num_local_experts), dtype=torch.int64),
            home_of_slot=like.new_empty((num_tokens, top_k), dtype=torch.int32),
            extent=like.new_empty((num_rows, 0)),
        )
        return list(layout)

    def bytes_sent(self) -> tuple[int, int]:
        """Rows are those that other ranks pull; headers, routing and scalars count as if every other rank read all."""
        rows = int(self._sent_rows) * self.spec.hidden_dim * self.spec.dtype.itemsize
        return rows + self._sent_other_bytes, rows

    def num_host_syncs(self) -> int:
        return self._host_syncs

    def close(self) -> None:
        self.rounds.close()
        self.workspace.close()

    # -- parts of them -----------------------------------------------------------------------------------------------

    def _publish(
        self, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor] | torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Lay out rows, and in a dispatch the routing; returns when, or in stream order where, all ranks have."""
        header = self.headers.write(call, x.shape[0])
        assert header is not None  # there is a call
        words, headers, state = header
        own = self.workspace.own
        shelf = Shelf(own["rows"], own["ids"], own["scores"], headers, state, self._sent_rows, self.spec.rank)
        self.rounds.await_free("rows", call)
        home_of_slot = launch_publish(x, routing, words, shelf, self.spec.num_experts, self.spec.num_local_experts)
        self.rounds.publish("rows")
        self.rounds.await_published(call)
        return home_of_slot

    def _count(self, call: Call) -> tuple[Published, Groups, _Counted]:
        """Read the headers and count rows; the one host synchronisation."""
        spec = self.spec
        ep_size, num_header_words = spec.ep_size, spec.ep_size * HEADER_WORDS
        report = torch.empty(num_header_words + ep_size + 1, dtype=torch.int64, device=self.device)
        heard = report[:num_header_words].view(ep_size, HEADER_WORDS)
        self.headers.read(heard)
        table, bound = self.workspace.table, call.facts.num_tokens_per_rank
        published = Published(table["ids"], table["scores"], heard[:, TOKENS], spec.top_k)
        groups = launch_count_published(
            published,
            (spec.rank * spec.num_local_experts, spec.num_local_experts),
            spec.expert_alignment,
            spec.num_max_tokens_per_rank if bound < 0 else bound,
            _NO_LIMIT,
            report[num_header_words:-1],
            report[-1:],
        )
        on_host = report.tolist()
        self._host_syncs += 1
        self.rounds.raise_if_given_up()
        words = [on_host[start : start + HEADER_WORDS] for start in range(0, num_header_words, HEADER_WORDS)]
        call.verify([header[:NUM_WORDS] for header in words])
        counted = _Counted([header[TOKENS] for header in words], on_host[num_header_words:-1], on_host[-1])
        return published, groups, counted

    def _pull(self, layout: SymmetricLayout) -> torch.Tensor:
        """Rows `[R, D]` along a layout, from what all ranks have published; the end of their round."""
        rows = new_rows(layout.extent.shape[0], self.workspace.own["rows"])
        launch_pull_rows(self.workspace.table["rows"], layout.row_of_slot, self.spec.rank, rows)
        self.rounds.finish_reading()
        if self.spec.expert_alignment > 1:
            launch_zero_padding(layout.padding, self.spec.expert_alignment, rows)
        return self._poisoned(rows)

    def _lay_out_partials(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        layout: SymmetricLayout,
        slots: range,
        call: Call,
        *,
        opening: bool = True,
    ) -> None:
        """A round of partial sums: lay out this rank's and wait for everyone's."""
        header = self.headers.write(call) if opening else None
        self.rounds.await_free("partials", call)
        partials, rank = self.workspace.own["partials"], self.spec.rank
        launch_pre_add(rows, layout.row_of_slot, weights, slots, partials, rank, self._sent_rows, header)
        self.rounds.publish("partials")
        self.rounds.await_published(call)
        self.headers.compare(call if opening else None)

    def _count_other(self, num_bytes: int) -> None:
        self._sent_other_bytes += (self.spec.ep_size - 1) * (num_bytes + 8 * HEADER_WORDS)

    def _partials_for(self, layout: SymmetricLayout) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return (
            self.workspace.table["partials"],
            layout.home_of_slot,
            self.spec.rank,
            self.spec.num_max_tokens_per_rank,
        )

    def _add_slots(
        self, rows: torch.Tensor, weights: torch.Tensor | None, layout: SymmetricLayout, call: Call, out: torch.Tensor
    ) -> None:
        """One round a slot, the same number on every rank, through the same buffer."""
        sums = out.new_empty(out.shape if self.spec.top_k > 1 else (0, 0), dtype=torch.float32)
        table, home_of_slot, rank, max_tokens = self._partials_for(layout)
        for slot in range(self.spec.top_k):
            self._lay_out_partials(rows, None, layout, range(slot, slot + 1), call, opening=slot == 0)
            launch_add_slot(table, home_of_slot, weights, slot, rank, max_tokens, sums, out)
            self.rounds.finish_reading()

    def _poisoned(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs of a call that was given up are NaN; on a CPU such a call has raised before it comes here."""
        if self.device.type == "cuda":
            launch_poison(self.rounds.given_up, out)
        return out
