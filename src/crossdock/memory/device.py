"""Blocks in the memory of GPUs that reach each other: `torch.distributed._symmetric_memory`, without multicast.

The module meets through a process group that it looks up by name. Ours is one without any backend: rank, size and a
store of this opening alone, known by a name of this opening alone, and only while the ranks meet.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendUnavailable
from .block import Block
from .host import identity, refuse_other_hosts
from .meeting import Meeting


class DeviceBlock(Block):
    """Blocks of `num_bytes` on CUDA devices, one a rank. Opening is collective.

    Raises:
        BackendUnavailable: the group spans hosts, or the devices do not reach each other.
        TransportFault: a rank did not come.
    """

    def __init__(self, num_bytes: int, device: torch.device, meeting: Meeting, name: str, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory
        from torch._C._distributed_c10d import _SymmetricMemory

        facts = meeting.share("blocks", {"place": identity(), "name": socket.gethostname()})
        refuse_other_hosts([(fact["place"], fact["name"]) for fact in facts], backend)
        failure = ""
        try:
            self._own: torch.Tensor | None = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            with _known_as(name, meeting):
                self._handle: Any = _SymmetricMemory.rendezvous(self._own, name)
            self._own.zero_()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        failures = [fact["failure"] for fact in meeting.share("mapped", {"failure": failure})]
        told = [f"on rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        if told:
            self._handle = self._own = None
            raise BackendUnavailable(backend, "the devices do not share memory, " + "; ".join(told))
        self._num_bytes = num_bytes

    def of_rank(self, rank: int) -> torch.Tensor:
        """See `Block`."""
        block: torch.Tensor = self._handle.get_buffer(rank, (self._num_bytes,), torch.uint8)
        return block

    def close(self) -> None:
        """See `Block`."""
        self._handle = self._own = None


@contextmanager
def _known_as(name: str, meeting: Meeting) -> Iterator[None]:
    """Let torch find the ranks of a meeting under `name`."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    assert meeting.store is not None  # a group of one has a private block
    store = dist.PrefixStore("rendezvous", meeting.store)
    group = dist.ProcessGroup(store, meeting.rank, meeting.size)
    known: Any = name  # a type of its own to torch, which is a string
    group._set_group_name(known)
    _register_process_group(known, group)
    _SymmetricMemory.set_group_info(name, meeting.rank, meeting.size, store)
    try:
        yield
    finally:
        _unregister_process_group(known)
