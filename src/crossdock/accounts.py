"""What a dispatcher's dispatches asked for and got, under which policy, and who is told of it.

The ledger writes down (`ledger.py`). This is where it is opened, once it is known where the rows live, and where what
it has counted becomes an error, a warning, or news for a guard.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Protocol

import torch
from torch import Tensor

from .backends.base import Received, TransportSpec
from .callers import level_of_caller
from .group.fingerprint import CallFacts
from .inputs import refuse_late
from .kernels.account import Account
from .ledger import DeviceLedger, Drop, Entry, HostLedger, open_ledger
from .row_capacity import tokens_of_call, what_to_change
from .types import DispatcherConfig, OnOverflow


class Guard(Protocol):
    """What keeps truncated steps from being applied (see `overflow/`)."""

    @property
    def has_stepped(self) -> bool:
        """Whether it was ever asked to end a step."""

    def has_skipped_unread(self, *, wait: bool) -> bool:
        """Whether it did not apply a step that it has not read yet; waits for the device, or else may not know."""


class Accounts:
    """Of one dispatcher.

    Attributes:
        guard: who keeps truncated steps from being applied, held weakly.
    """

    def __init__(self, config: DispatcherConfig, spec: TransportSpec, device: torch.device | None) -> None:
        self._config, self._spec = config, spec
        self.guard: weakref.ref[Guard] | None = None
        self._policies: dict[str, OnOverflow] = {}  # of layers with one of their own
        self._told = (0, 0, 0)  # of the ledger's troubles
        self._may_skip, self._has_warned = config.on_overflow == "skip_step", False
        self._has_trained = False  # whether a dispatch came in grad mode
        self._ledger = None if device is None else self._open(device)

    @property
    def ledger(self) -> HostLedger | DeviceLedger:
        """What its dispatches asked for and got."""
        if self._ledger is None:  # any device will do, and nothing has come yet
            self._ledger = self._open(torch.device("cpu"))
        return self._ledger

    @property
    def opened_ledger(self) -> HostLedger | DeviceLedger | None:
        """`ledger`, or None where it is not known yet on which device."""
        return self._ledger

    def set_policy(self, layer: str, on_overflow: OnOverflow) -> None:
        """Give a layer an `on_overflow` of its own."""
        self._policies[layer] = on_overflow
        self._may_skip |= on_overflow == "skip_step"

    def offer(self, x: Tensor, facts: CallFacts) -> Account | None:
        """Where what moves the rows of a dispatch of `x [T, hidden_dim]` may write it down; None: `enter` does."""
        if self._ledger is None:  # alone: the first dispatch says where the rows live
            self._ledger = self._open(x.device)
        if facts.num_rows < 0:  # the host waits for counts, and may refuse them
            return None
        return self._ledger.account(facts.layer, self._policy_of(facts.layer))

    def enter(
        self, x: Tensor, expert_ids: Tensor, facts: CallFacts, received: Received, *, was_offered: bool = False
    ) -> Tensor:
        """Write that dispatch down, unless that is done where an account `was_offered`.

        Returns:
            `[1]` int64: the end of its last expert's rows.
        """
        self._has_trained |= facts.grad_mode
        rows_end = received.rows_end if was_offered else None
        if rows_end is None:
            rows_end = self._write(x, facts, received)
        if self._config.distinct_experts:
            self.ledger.note_repeats(expert_ids)
        return rows_end

    def _write(self, x: Tensor, facts: CallFacts, received: Received) -> Tensor:
        wanted, bad_ids = received.demand
        kept, ends = received.tokens_per_expert, received.expert_offsets
        bound = int(tokens_of_call(self._config, x.shape[0], facts.num_tokens_per_rank))
        policy = self._policy_of(facts.layer)
        return self.ledger.enter(
            Entry(facts.layer, x.shape[0], facts.num_rows, wanted, kept, ends, bad_ids, max(bound, 1), policy)
        )

    def _policy_of(self, layer: str) -> OnOverflow:
        return self._policies.get(layer, self._config.on_overflow)

    def forget_fill(self, layer: str) -> None:
        """A layer's capacity has changed."""
        if self._ledger is not None:
            self._ledger.forget_fill(layer)

    def take(self, device: torch.device) -> Tensor:
        """`Ledger.take`; of a dispatcher that has no ledger yet on `device`, with nothing in it."""
        return torch.zeros(1, dtype=torch.int64, device=device) if self._ledger is None else self._ledger.take()

    @property
    def has_news(self) -> bool:
        """Whether anything has been told since the last `look`; does not wait."""
        return self._ledger is not None and self._ledger.told() != self._told

    def look(self, *, at_the_end: bool = False) -> str | None:
        """Look at what has been told since the last time; does not wait.

        A guard that has not stepped yet may be about to; `at_the_end` says that it will not.

        Returns:
            Why to give up, in words, where rows were dropped under `on_overflow="raise"`.

        Raises:
            InvalidInput: ids that only the device could see.
        """
        ledger = self._ledger
        if ledger is None:
            return None
        unwatched, news = self._unwatched(ledger, at_the_end), ledger.told()
        if news != self._told and not ledger.is_capturing():
            before, self._told = self._told, news
            if news[0] > before[0]:
                return self._overflow(ledger)
            refuse_late(news[1] - before[1], news[2] - before[2], self._config.num_experts)
        if unwatched is not None:
            self._has_warned = True
            idle = self.living_guard() is not None
            warnings.warn(_advice(unwatched, self._spec.rank, guard_is_idle=idle), stacklevel=level_of_caller())
        return None

    def _unwatched(self, ledger: HostLedger | DeviceLedger, at_the_end: bool) -> Drop | None:
        """A layer that drops rows where a guard should skip the step, and none does; the first time only."""
        guard = self.living_guard()
        if not self._may_skip or self._has_warned or (guard is not None and guard.has_stepped):
            return None
        drop = ledger.drop()
        return drop if guard is None or (at_the_end and self._has_trained) else None

    def living_guard(self) -> Guard | None:
        """The guard, if there is one."""
        return None if self.guard is None else self.guard()

    def _overflow(self, ledger: HostLedger | DeviceLedger) -> str:
        trouble = ledger.trouble()
        applied = ""
        if self.living_guard() is not None:
            applied = "; the guard applies no step that lacks rows"
        elif self._has_trained:
            applied = "; there is no guard, so a step may have been applied"
        others = ", and more if other ranks asked for more" if self._spec.ep_size > 1 else ""
        return (
            f"layer {trouble.layer!r} on rank {self._spec.rank}: a dispatch asked for {trouble.demand} rows, and"
            f" row_capacity {self._config.row_capacity} had room for {trouble.capacity}; the last ones were dropped:"
            f" {what_to_change(self._config, trouble.demand, trouble.capacity)}{others}{applied}"
        )

    def _open(self, device: torch.device) -> HostLedger | DeviceLedger:
        return open_ledger(self._config.expert_alignment, self._spec.num_local_experts, device)


def _advice(drop: Drop, rank: int, *, guard_is_idle: bool) -> str:
    layer, dropped, wanted = repr(drop.layer), drop.num_dropped, drop.num_wanted
    if guard_is_idle:
        return (
            f"layer {layer} on rank {rank} has dropped {dropped} of {wanted} rows, and the OverflowGuard that watches"
            " its dispatcher was never stepped: steps that lack rows may have been applied. Call its step() in the"
            " place of optimizer.step()"
        )
    return (
        f"layer {layer} on rank {rank} has dropped {dropped} of {wanted} rows, and no OverflowGuard watches its"
        " dispatcher: without one on_overflow='skip_step' skips no step, it only counts. Make an"
        " OverflowGuard(dispatcher, optimizer) and call its step() in the place of optimizer.step(), or set"
        " on_overflow='drop' if dropping is meant"
    )
