"""What a guard is made of, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ..dispatcher import TokenDispatcher
from ..errors import ConfigError
from ..opened import OpenDispatcher
from ..types import RowCapacity, check_positive_int
from .sizing import Shrinking


def listed(given: Any) -> list[Any]:
    """One, or several."""
    return list(given) if isinstance(given, Iterable) else [given]


def checked_dispatchers(given: Any) -> list[TokenDispatcher]:
    """One dispatcher, or several.

    Raises:
        ConfigError: none, or what is none; so in all of these.
    """
    dispatchers: list[TokenDispatcher] = listed(given)
    if not dispatchers:
        raise ConfigError("an OverflowGuard needs at least one dispatcher, got none")
    for each in dispatchers:
        if not isinstance(each, TokenDispatcher):
            raise ConfigError(f"an OverflowGuard takes dispatchers, got {type(each).__name__}")
    return dispatchers


def checked_optimizers(given: Any) -> list[Optimizer]:
    """One optimizer, or several."""
    optimizers: list[Optimizer] = [given] if isinstance(given, Optimizer) else listed(given)
    if not optimizers:
        raise ConfigError("an OverflowGuard needs at least one optimizer, got none")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"an OverflowGuard takes torch optimizers, got {type(each).__name__}")
    return optimizers


def checked_shrinking(after: int | None, below: float) -> Shrinking | None:
    """When capacities become smaller; None: never."""
    if not 0 < below < 1:
        raise ConfigError(f"shrink_below must lie between 0 and 1, got {below!r}")
    if after is None:
        return None
    check_positive_int("shrink_after", after)
    return Shrinking(after, below)


def check_retry(opened: list[OpenDispatcher]) -> None:
    """Refuse to run steps again whose capacity would not be larger then, or which would not come to their end."""
    for config in (each.config for each in opened):
        capacity = config.row_capacity
        if capacity.kind not in ("exact", "calibrated") and capacity != RowCapacity.worst_case():
            raise ConfigError(
                f"retry=True needs a row capacity that grows, and {capacity} does not: take RowCapacity.calibrated(),"
                " or leave retry out"
            )
        if config.on_overflow == "raise" and capacity.kind == "calibrated":
            raise ConfigError(
                "retry=True needs on_overflow='skip_step': under 'raise' the step would not come to its end"
            )
