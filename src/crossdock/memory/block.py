"""One block of bytes a rank, which every rank of the group has mapped."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Block(ABC):
    """The block of this rank and those of its peers. Zero when it is opened; freed by `close`."""

    @abstractmethod
    def of_rank(self, rank: int) -> torch.Tensor:
        """The block of a rank as this rank sees it: `[num_bytes]` uint8."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all blocks; nobody may touch them through this object any more."""


class PrivateBlock(Block):
    """The block of a group of one: ordinary memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes: torch.Tensor | None = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def of_rank(self, rank: int) -> torch.Tensor:
        """See `Block`."""
        assert self._bytes is not None, "closed"
        return self._bytes

    def close(self) -> None:
        """See `Block`."""
        self._bytes = None
