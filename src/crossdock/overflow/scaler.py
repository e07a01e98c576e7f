"""What a guard does with torch's `GradScaler`: raise its flag for a step, and put it back for a step that runs again.

A scaler has a stage for every optimizer (ready, unscaled, stepped), and what infinities it has found in its gradients,
until its `update`. torch has no public way to either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

_FOUND = "found_inf_per_device"
_States = dict[int, dict[str, Any]]  # by the id of an optimizer


class ScalerState(NamedTuple):
    """Stages and infinities by optimizer; of no scaler, none. Not its scale, which only `update` changes."""

    scaler: Any
    of_optimizers: _States

    @classmethod
    def of(cls, scaler: Any) -> ScalerState:
        """The state right now of an enabled `torch.amp.GradScaler`, or of None."""
        return cls(scaler, {} if scaler is None else _copied(scaler._per_optimizer_states))

    def restore(self) -> None:
        """Go back to it, as often as it takes."""
        if self.scaler is not None:
            states: _States = self.scaler._per_optimizer_states
            states.clear()
            states.update(_copied(self.of_optimizers))


def unscale(scaler: Any, optimizer: Optimizer) -> None:
    """Unscale the gradients, unless the caller has."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
        scaler.unscale_(optimizer)


@contextmanager
def infinite(scaler: Any, optimizer: Optimizer, flag: Tensor) -> Iterator[None]:
    """Add `flag` to what the scaler has found infinite, for its step alone: its scale does not follow from it."""
    unscale(scaler, optimizer)
    found = scaler._per_optimizer_states[id(optimizer)][_FOUND]
    before = {device: value.clone() for device, value in found.items()}
    for value in found.values():
        value.copy_(torch.maximum(value, flag.to(value.device)))
    try:
        yield
    finally:
        for device, value in found.items():
            value.copy_(before[device])


def _copied(states: Mapping[int, dict[str, Any]]) -> _States:
    """With dicts and tensors of their own, since a scaler writes into both."""
    return {
        optimizer: {**state, _FOUND: {device: found.clone() for device, found in state[_FOUND].items()}}
        for optimizer, state in states.items()
    }
