"""Numbers on their way from a device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host, which need not wait for it; nobody writes to the tensor any more."""

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def has_arrived(self) -> bool:
        """Whether `values` would not wait."""
        return self._event is None or self._event.query()

    def values(self) -> list[Any]:
        """Its values; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values
