"""What all ranks have seen of one step, on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host_copy import HostCopy

# Why a step is truncated: rows were dropped, a call was given up, or ranks came to different steps.
DROPPED, GIVEN_UP, APART = 1, 2, 3


class Report:
    """What a guard decides by.

    Args:
        code: `[1]` int64 on the device: 0, `DROPPED`, `GIVEN_UP` or `APART`.
        news: by dispatcher, what `Ledger.take` gave, the largest of all ranks.

    Attributes:
        flag: float32 without dimensions, on the device: 1 where the step is truncated.
    """

    def __init__(self, code: Tensor, news: list[Tensor]) -> None:
        self.flag = (code != 0).to(torch.float32).reshape(())
        self._sizes = [len(part) for part in news]
        self._copy = HostCopy(torch.cat([code, *news]))

    def has_arrived(self) -> bool:
        """Whether the others would not wait."""
        return self._copy.has_arrived()

    @property
    def code(self) -> int:
        """`code`; waits for the device."""
        return int(self._copy.values()[0])

    @property
    def of_dispatchers(self) -> list[list[int]]:
        """`news`; waits for the device."""
        words = self._copy.values()[1:]
        ends = [sum(self._sizes[: i + 1]) for i in range(len(self._sizes))]
        return [words[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
