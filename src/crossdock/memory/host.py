"""Blocks in the shared memory of one host: what a CPU's ranks see alike.

A block is an anonymous file of memory (`memfd_create`). It has no name, so nothing can be left behind, however a rank
ends: the kernel frees it with the last mapping. A peer maps it through the descriptor's entry under `/proc`.
"""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

import torch

from ..errors import BackendUnavailable
from .block import Block
from .meeting import Meeting


def identity() -> str:
    """Names the place in which processes can see each other's memory: this boot of this host, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def refuse_other_hosts(places: list[tuple[str, str]], backend: str) -> None:
    """Refuse a group that spans hosts; `places` are `identity()` and the host's name, by rank.

    Raises:
        BackendUnavailable: on every rank alike.
    """
    if len({place for place, _ in places}) == 1:
        return
    ranks_of: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for rank, (place, name) in enumerate(places):
        ranks_of.setdefault(place, []).append(rank)
        names[place] = name
    told = ", ".join(f"ranks {ranks} on {names[place]}" for place, ranks in ranks_of.items())
    raise BackendUnavailable(
        backend, f"the group spans hosts or containers ({told})", "open it over the ranks of one host"
    )


class HostBlock(Block):
    """Blocks of `num_bytes` on a CPU. Opening is collective.

    Raises:
        BackendUnavailable: the group spans hosts, or a peer's block cannot be mapped; on every rank alike.
        TransportFault: a rank did not come.
    """

    def __init__(self, num_bytes: int, meeting: Meeting, backend: str) -> None:
        self._by_rank: list[torch.Tensor] = []
        own = os.memfd_create("crossdock", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, num_bytes)
            here = {"place": identity(), "name": socket.gethostname(), "pid": os.getpid(), "fd": own}
            facts = meeting.share("blocks", here)
            refuse_other_hosts([(fact["place"], fact["name"]) for fact in facts], backend)
            failure = self._map_all([(fact["pid"], fact["fd"]) for fact in facts], num_bytes)
            # The descriptors stay open until everybody has mapped them.
            failures = [fact["failure"] for fact in meeting.share("mapped", {"failure": failure})]
        finally:
            os.close(own)
        told = [f"on rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        if told:
            self.close()
            raise BackendUnavailable(backend, "a peer's memory cannot be mapped, " + "; ".join(told))

    def _map_all(self, descriptors: list[tuple[int, int]], num_bytes: int) -> str:
        """Map every rank's block; returns what went wrong, in words."""
        for pid, number in descriptors:
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                return str(error)
            try:
                pages = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                return str(error)
            finally:
                os.close(descriptor)
            self._by_rank.append(torch.frombuffer(pages, dtype=torch.uint8))
        return ""

    def of_rank(self, rank: int) -> torch.Tensor:
        """See `Block`."""
        return self._by_rank[rank]

    def close(self) -> None:
        """See `Block`; the pages go with the last tensor that shows them.

        Triton's interpreter leaves what it was given last in reference cycles, so that may be the next collection.
        """
        self._by_rank.clear()
