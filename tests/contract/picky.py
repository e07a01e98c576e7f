"""Backends that cannot take any token counts: a loopback that insists on what its traits ask for."""

from __future__ import annotations

import dataclasses

import torch

from crossdock.backends.base import Backend, Call, GroupFacts, Link, Received, Transport, TransportSpec
from crossdock.backends.loopback import LoopbackBackend, LoopbackWire
from crossdock.backends.wire import WireTransport


class PickyTransport(WireTransport):
    """Refuses dispatches of unaligned or unequal counts, and those that its storage has no room for.

    `num_tokens` has the count of every dispatch.
    """

    alignment, equal = 1, False

    def __init__(self, spec: TransportSpec, wire: LoopbackWire, device: torch.device) -> None:
        super().__init__(spec, wire, device)
        self.num_tokens: list[int] = []
        self.closed = False

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        came = x.shape[0]
        assert came % self.alignment == 0, f"{came} tokens are no multiple of {self.alignment}"
        assert came <= self.spec.num_max_tokens_per_rank, f"{came} tokens have no room"
        assert scores.shape[0] == expert_ids.shape[0] == came
        if self.equal:
            waited = self._host_syncs
            most = self.agree_max(came, call)
            self._host_syncs = waited  # the other question of this call is the one that a test looks at
            assert most == came, f"{came} tokens, and another rank brings {most}"
        self.num_tokens.append(came)
        return super().dispatch(x, scores, expert_ids, num_rows, call)

    def close(self) -> None:
        self.closed = True
        super().close()


class PickyBackend(Backend):
    """A loopback with `token_alignment`, and without `ragged_counts` if they must be `equal`."""

    name = "picky"

    def __init__(self, alignment: int, *, equal: bool) -> None:
        self.traits = dataclasses.replace(LoopbackBackend.traits, token_alignment=alignment, ragged_counts=not equal)

    def __repr__(self) -> str:
        return f"aligned to {self.traits.token_alignment}{'' if self.traits.ragged_counts else ' and equal'}"

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        return LoopbackBackend().refusal(spec, group)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        assert spec.num_max_tokens_per_rank % self.traits.token_alignment == 0, "storage for the rounded maximum"
        device = link.members.device
        assert device is not None  # a group has one
        wire = LoopbackWire(spec, link.members.in_process.group.board(link.store_prefix))
        transport = PickyTransport(spec, wire, device)
        transport.alignment, transport.equal = self.traits.token_alignment, not self.traits.ragged_counts
        return transport
