"""To how many rows each layer's dispatches are sized: by a formula, or by what the layer has measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from .errors import ContractViolation
from .row_capacity import Calibration, Size, resolve_num_rows, tokens_of_call
from .types import DispatcherConfig

_SIZES_REMEMBERED = 1024
_T = TypeVar("_T")


class LayerSizes:
    """Of one dispatcher's layers. Every rank comes to the same sizes at the same call."""

    def __init__(self, config: DispatcherConfig, ep_size: int) -> None:
        self._config, self._ep_size = config, ep_size
        self._calibrations: dict[str, Calibration] = {}
        self._resolve_num_rows = lru_cache(_SIZES_REMEMBERED)(partial(resolve_num_rows, config, ep_size))
        self._is_calibrating = False

    def planned(self, num_tokens: Size, num_tokens_per_rank: Size) -> Size | None:
        """Rows of a dispatch where they follow from its sizes alone, symbolic ones too; None for the other kinds."""
        if self._config.row_capacity.kind in ("exact", "calibrated"):
            return None
        tokens = tokens_of_call(self._config, num_tokens, num_tokens_per_rank)
        return resolve_num_rows(self._config, self._ep_size, tokens)

    def of_call(self, layer: str, x: Tensor, num_tokens_per_rank: int, *, compiled: bool) -> int | None:
        """Rows to size a dispatch of `x [T, hidden_dim]` to; None for as many as come.

        Raises:
            ContractViolation: that would wait for a number where nothing can.
        """
        capacity = self._config.row_capacity
        if capacity.kind == "exact":
            if _is_capturing(x):
                raise ContractViolation(
                    f"a dispatch of layer {layer!r} under row_capacity {capacity} waits for the host, which a"
                    " CUDA graph cannot capture; choose another row capacity for it"
                )
            return None
        measured = self._calibrations.get(layer)
        if capacity.kind == "calibrated" and (measured is None or self._is_calibrating):
            if compiled or _is_capturing(x):
                raise ContractViolation(
                    f"layer {layer!r} is not calibrated yet: row_capacity {capacity} measures the first eager"
                    " dispatch of every layer, so make one before this layer is compiled or captured"
                )
            return None
        tokens = tokens_of_call(self._config, x.shape[0], num_tokens_per_rank)
        return int(self._resolve_num_rows(tokens, measured))

    def measure(self, layer: str, num_tokens: int, num_tokens_per_rank: int, most_rows: int) -> bool:
        """Keep what all ranks have agreed on, and say so; where nothing came, the next dispatch tries again."""
        tokens = int(tokens_of_call(self._config, num_tokens, num_tokens_per_rank))
        seen, before = Calibration(most_rows, tokens), self._calibrations.get(layer)
        if not most_rows or (before is not None and not seen.exceeds(before)):
            return False
        self._calibrations[layer] = seen
        return True

    def measured(self, layer: str) -> Calibration | None:
        """What a layer is sized by, if it is calibrated."""
        return self._calibrations.get(layer)

    def set(self, layer: str, calibration: Calibration) -> None:
        """Size a layer by something else from the next dispatch on; on all ranks at the same call."""
        self._calibrations[layer] = calibration

    def forget(self, layer: str | None) -> None:
        """Forget what a layer's calibrating dispatch measured, or all layers'."""
        if layer is None:
            self._calibrations.clear()
        else:
            self._calibrations.pop(layer, None)

    def calibrate(self, step: Callable[[], _T]) -> _T:
        """See `TokenDispatcher.calibrate`."""
        self._calibrations.clear()
        self._is_calibrating = True
        try:
            return step()
        finally:
            self._is_calibrating = False


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
