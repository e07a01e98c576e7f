"""What the ranks of a measurement tell each other, over the default group."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def agree(value: Value) -> list[Value]:
    """Every rank's value, by rank. Collective."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(times: Sequence[float]) -> float:
    """The largest of all ranks' medians. Collective."""
    return max(agree(statistics.median(times)))
