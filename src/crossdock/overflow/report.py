"""What all ranks have seen of one step, on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ledger import HostCopy


class Report:
    """Of one step.

    Attributes:
        flag: float32 without dimensions, on the device: 1 where the step is truncated.
    """

    def __init__(self, code: Tensor, news: list[Tensor]) -> None:
        self.flag = (code != 0).to(torch.float32).reshape(())
        self._sizes = [len(part) for part in news]
        self._copy = HostCopy(torch.cat([code, *news]))

    def values(self) -> list[int]:
        """1 (rows were dropped) or 2 (a call was given up), then every dispatcher's words; waits for the device."""
        return self._copy.values()

    def has_arrived(self) -> bool:
        """Whether `values` would not wait."""
        return self._copy.has_arrived()

    def split(self, words: list[int]) -> list[list[int]]:
        """Every dispatcher's words."""
        ends = [sum(self._sizes[: i + 1]) for i in range(len(self._sizes))]
        return [words[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
