"""A workspace: named buffers at the same places of every rank's block, with a table of addresses for each."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..group.members import Members
from .block import Block, PrivateBlock
from .device import DeviceBlock
from .host import HostBlock
from .meeting import Meeting

_ALIGNMENT = 256  # bytes: more than any vector load asks for


class BufferSpec(NamedTuple):
    """One named buffer, of the same shape on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


def place_buffers(buffers: Sequence[BufferSpec]) -> tuple[list[int], int]:
    """Where each buffer begins in its block, and how long the block is, in bytes.

    >>> place_buffers([BufferSpec("a", (3,), torch.int64), BufferSpec("b", (300,), torch.uint8)])
    ([0, 256], 768)
    """
    starts, end = [], 0
    for buffer in buffers:
        starts.append(end)
        end += -(-max(buffer.num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def most_bytes(device: torch.device, num_ranks: int) -> int:
    """How long a block can be at most: a GPU's whole memory; on a CPU each rank's share of its host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


class Workspace:
    """Buffers that every rank of a group can reach, opened together, at addresses that never change.

    Attributes:
        own: this rank's buffers by name.
        table: by name, the addresses `[ep_size]` int64 of every rank's buffer, on the device; kernels read peers
            through it.
        num_bytes: of this rank's block.
    """

    def __init__(self, buffers: Sequence[BufferSpec], block: Block, ranks: range, own_rank: int) -> None:
        starts, self.num_bytes = place_buffers(buffers)
        self._block = block
        self._place = {
            buffer.name: (buffer, slice(start, start + buffer.num_bytes))
            for buffer, start in zip(buffers, starts, strict=True)
        }
        self.own = {name: self.of_rank(name, own_rank) for name in self._place}
        self.table = {name: self._addresses(name, ranks) for name in self._place}

    @classmethod
    def open(
        cls, buffers: Sequence[BufferSpec], members: Members, device: torch.device, prefix: str, timeout_s: float
    ) -> Workspace:
        """Allocate and map; collective over the members of one opening, whose store prefix is `prefix`.

        Raises:
            BackendUnavailable: the group spans hosts, or its members cannot map each other's memory.
            TransportFault: a member did not come within `timeout_s`.
        """
        block = _open_block(place_buffers(buffers)[1], members, device, prefix, timeout_s)
        return cls(buffers, block, range(members.size), members.rank)

    def of_rank(self, name: str, rank: int) -> torch.Tensor:
        """A rank's buffer as this rank sees it."""
        buffer, part = self._place[name]
        return self._block.of_rank(rank)[part].view(buffer.dtype).view(buffer.shape)

    def close(self) -> None:
        """Free the block and let go of the peers'."""
        self.own.clear()
        self.table.clear()
        self._block.close()

    def _addresses(self, name: str, ranks: range) -> torch.Tensor:
        addresses = [self.of_rank(name, rank).data_ptr() for rank in ranks]
        return torch.tensor(addresses, dtype=torch.int64, device=self.own[name].device)


def _open_block(num_bytes: int, members: Members, device: torch.device, prefix: str, timeout_s: float) -> Block:
    if members.size == 1:
        return PrivateBlock(num_bytes, device)
    meeting = Meeting(members, prefix, timeout_s)
    if device.type == "cuda":
        return DeviceBlock(num_bytes, device, meeting, prefix, "symmetric")
    return HostBlock(num_bytes, meeting, "symmetric")
