"""`torch.distributed` collectives: Gloo on CPU, NCCL on GPU, any number of hosts.

On Gloo a wrong size kills the process or returns stale bytes, so every operation's fixed-size header is compared before
any row moves. On NCCL a wrong size can only hang, so only dispatch, which waits for the host anyway, compares at once;
elsewhere the headers travel beside the rows and the watch reads them when a wait expires.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..group.faults import TransportFault
from ..group.gloo import OwnGloo, first_line
from ..types import SUPPORTED_DTYPES
from .base import EVERY_ROW_CAPACITY, Backend, BackendTraits, Call, GroupFacts, Link, Transport, TransportSpec
from .wire import Finish, Wire, WireTransport


class GlooWire(Wire):
    """A Gloo communicator of its own over the group's members; nothing else uses it."""

    def __init__(self, spec: TransportSpec, link: Link) -> None:
        super().__init__(spec.rank, spec.ep_size)
        self._timeout_s = spec.timeout_s
        self._own = OwnGloo(link.members, link.store_prefix, spec.timeout_s)

    def swap_headers(self, headers: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        came, finish = self._start_headers(headers)
        finish()
        return headers, came

    def open_call(self, headers: torch.Tensor, call: Call) -> Finish:
        came, finish = self._start_headers(headers)

        def compare() -> None:
            finish()
            call.verify(came.tolist())

        return compare

    def _start_headers(self, headers: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        came = torch.empty_like(headers)
        return came, self._all_to_all(came, headers, [], [])

    def start(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Finish:
        if rows.dtype == torch.bfloat16:
            out, rows = out.view(torch.uint8), rows.view(torch.uint8)
        return self._all_to_all(out, rows.contiguous(), arriving, leaving)

    def _all_to_all(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Finish:
        begun = time.monotonic()
        with self._translated(begun):
            work = self._own.group.alltoall_base(out, rows, arriving, leaving, dist.AllToAllOptions())

        def finish() -> None:
            with self._translated(begun):
                # Gloo waits for one peer after the other, each time for up to its limit: the sum is bounded here.
                work.wait(timedelta(seconds=self._timeout_s))

        return finish

    @contextmanager
    def _translated(self, begun: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            expired = time.monotonic() - begun >= self._timeout_s
            late = f"an exchange did not finish within {self._timeout_s:g} s"
            raise TransportFault(late if expired else first_line(error), expired=expired) from error

    def abandon(self) -> None:
        self.close()  # its connections end with it, and peers that wait notice

    def close(self) -> None:
        self._own.close()


class AllToAllBackend(Backend):
    """Rows by `all_to_all` of torch.distributed."""

    name = "all_to_all"
    traits = BackendTraits(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset(SUPPORTED_DTYPES),
        row_capacities=EVERY_ROW_CAPACITY,
        sync_free_devices=frozenset({"cpu"}),  # NCCL takes its splits from the host
        multi_node=True,
        needs="torch.distributed with Gloo (CPU) or NCCL (GPU)",
    )

    def workspace_bytes(self, spec: TransportSpec) -> int:
        return 0

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        if group.transport not in ("gloo", "nccl", "none"):
            return f"it needs a torch.distributed group, not {group.transport}"
        if group.transport == "none":
            return "torch.distributed is not initialised"
        return super().refusal(spec, group)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        device = link.members.device
        assert device is not None  # a process group has one
        if device.type == "cuda":
            from .nccl import NcclWire

            return WireTransport(spec, NcclWire(spec, link), device)
        return WireTransport(spec, GlooWire(spec, link), device)
