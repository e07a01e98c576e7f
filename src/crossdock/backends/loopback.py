"""All ranks in one process, a thread each: the staged exchange over shared variables, for tests and for debugging."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..group.faults import TransportFault
from ..types import SUPPORTED_DTYPES
from .base import EVERY_ROW_CAPACITY, Backend, BackendTraits, Call, GroupFacts, Link, Transport, TransportSpec
from .wire import Finish, Wire, WireTransport, nothing


@dataclass
class LoopbackGroup:
    """A group of `size` ranks inside this process; give `member(rank)` to the dispatcher of each rank's thread.

    >>> group = LoopbackGroup(2)
    >>> group.member(1)
    LoopbackMember(rank=1)
    """

    size: int
    store: Any = field(default_factory=lambda: dist.HashStore(), repr=False)
    _boards: dict[str, _Board] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def member(self, rank: int) -> LoopbackMember:
        """What rank `rank` passes as its group."""
        return LoopbackMember(rank, self)

    def board(self, opening: str) -> _Board:
        """The board of one opening, shared by its ranks."""
        with self._lock:
            board = self._boards.setdefault(opening, _Board(self.size))
            board.joined += 1
            if board.joined == self.size:
                del self._boards[opening]  # nobody else will ask for it
            return board


@dataclass(frozen=True)
class LoopbackMember:
    """One rank of a `LoopbackGroup`."""

    rank: int
    group: LoopbackGroup = field(repr=False)

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self.group.size

    @property
    def store(self) -> Any:
        """Where the members meet to open."""
        return self.group.store

    def gathering(self, opening: str, timeout_s: float) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """A function that returns what every rank brings to it, by rank. Collective; `opening` is used once.

        It raises `TransportFault` where ranks do not come within `timeout_s`.
        """
        board, rounds = self.group.board(opening), itertools.count()

        def gather(values: torch.Tensor) -> list[torch.Tensor]:
            return board.swap(self.rank, next(rounds), [values.clone() for _ in range(self.size)], timeout_s)

        return gather


class _Board:
    """Where the ranks of one opening lay out what they send, in numbered rounds."""

    def __init__(self, size: int) -> None:
        self.size, self.joined = size, 0
        self._changed = threading.Condition()
        self._posts: dict[int, dict[int, list[torch.Tensor]]] = {}
        self._taken: dict[int, int] = {}
        self._left: set[int] = set()
        self._broken: tuple[int, list[int]] | None = None  # the first bad round, and who was missing in it

    def swap(self, rank: int, round_number: int, parts: list[torch.Tensor], timeout_s: float) -> list[torch.Tensor]:
        """Post one part for every rank; returns the parts that all ranks posted for this one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._raise_if_broken(round_number)
            posts = self._posts.setdefault(round_number, {})
            posts[rank] = parts
            self._changed.notify_all()
            while len(posts) < self.size:
                self._look_for_missing(round_number, posts, deadline)
                self._raise_if_broken(round_number)
                self._changed.wait(max(deadline - time.monotonic(), 0))
            came = [posts[peer][rank] for peer in range(self.size)]
            self._taken[round_number] = self._taken.get(round_number, 0) + 1
            if self._taken[round_number] == self.size:
                del self._posts[round_number], self._taken[round_number]
        return came

    def leave(self, rank: int) -> None:
        """A rank that closes will post nothing more; who waits for it need not wait any longer."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _look_for_missing(self, round_number: int, posts: dict[int, list[torch.Tensor]], deadline: float) -> None:
        absent = [peer for peer in range(self.size) if peer not in posts]
        gone = [peer for peer in absent if peer in self._left]
        missing = absent if time.monotonic() >= deadline else gone
        if self._broken is None and missing:
            self._broken = round_number, missing
            self._changed.notify_all()

    def _raise_if_broken(self, round_number: int) -> None:
        """All ranks name the same missing ones, those who come later too."""
        if self._broken is not None and round_number >= self._broken[0]:
            raise TransportFault("exchange {} ended without ranks {}".format(*self._broken), self._broken[1])


class LoopbackWire(Wire):
    """Swaps through a `_Board`; what is posted is copied, as on any other wire."""

    def __init__(self, spec: TransportSpec, board: _Board) -> None:
        super().__init__(spec.rank, spec.ep_size)
        self._board, self._timeout_s, self._round = board, spec.timeout_s, 0

    def swap_headers(self, headers: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        came = torch.empty_like(headers)
        self._exchange(came, headers, [1] * self.size, [1] * self.size)
        return headers.cpu(), came.cpu()

    def abandon(self) -> None:
        self._board.leave(self.rank)

    def close(self) -> None:
        self._board.leave(self.rank)

    def start(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Finish:
        self._exchange(out, rows, arriving, leaving)
        return nothing

    def _exchange(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> None:
        parts = [part.clone() for part in rows.split(leaving)]
        came = self._board.swap(self.rank, self._round, parts, self._timeout_s)
        self._round += 1
        for place, part in zip(out.split(arriving), came, strict=True):
            place.copy_(part)


class LoopbackBackend(Backend):
    """The backend of a `LoopbackGroup`."""

    name = "loopback"
    preference = "preferred"
    traits = BackendTraits(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset(SUPPORTED_DTYPES),
        row_capacities=EVERY_ROW_CAPACITY,
        ranks_share_gpus=True,
        needs="a crossdock.testing.LoopbackGroup",
    )

    def workspace_bytes(self, spec: TransportSpec) -> int:
        return 0

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        if group.transport != "in_process":
            return "it serves the members of a LoopbackGroup only"
        return super().refusal(spec, group)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        member = link.members.in_process
        device = link.members.device
        assert device is not None  # a group has one
        return WireTransport(spec, LoopbackWire(spec, member.group.board(link.store_prefix)), device)
