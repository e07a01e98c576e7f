"""A layer's capacity, made to fit what it was asked for: larger after an overflow, smaller where that was asked for.

Everything here works on numbers that the group has agreed on, so every rank comes to the same sizes at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..ledger import TOKENS_OF_PEAK
from ..opened import OpenDispatcher
from ..row_capacity import Calibration, fitted, has_room


class Resized(NamedTuple):
    """How many layers got a larger and a smaller capacity."""

    grown: int
    shrunk: int


@dataclass(frozen=True)
class Shrinking:
    """When a layer's capacity becomes smaller: after `after` steps in a row with at most `below` of it taken up."""

    after: int
    below: float


class _Quiet(NamedTuple):
    """How many steps in a row a layer has taken up little of its capacity, and the most of them."""

    steps: int
    most: Calibration


class Sizer:
    """The layers of one dispatcher; only those that are calibrated have a size to change."""

    def __init__(self, opened: OpenDispatcher, shrinking: Shrinking | None) -> None:
        self._opened, self._shrinking = opened, shrinking
        self._quiet: dict[str, _Quiet] = {}

    def fit(self, words: Sequence[int]) -> Resized:
        """Take what the group has agreed on of one step, as `Ledger.take` lays it out."""
        num_layers = (len(words) - 1) // 2
        layers = self._opened.accounts.ledger.layers[:num_layers] if num_layers else []
        dropped, seen = words[1 : 1 + num_layers], words[1 + num_layers :]
        grown = sum(self._grow(layer, peak) for layer, peak in zip(layers, dropped, strict=True))
        shrunk = sum(self._shrink(layer, peak) for layer, peak in zip(layers, seen, strict=True))
        return Resized(grown, shrunk)

    def dropping(self, words: Sequence[int]) -> list[str]:
        """The layers of these that dropped rows."""
        num_layers = (len(words) - 1) // 2
        layers = self._opened.accounts.ledger.layers[:num_layers] if num_layers else []
        return [layer for layer, peak in zip(layers, words[1 : 1 + num_layers], strict=True) if peak]

    def _grow(self, layer: str, peak: int) -> bool:
        measured, seen = self._opened.sizes.measured(layer), Calibration(peak, TOKENS_OF_PEAK)
        if not peak or measured is None or has_room(self._opened.config, measured, seen):
            return False
        self._resize(layer, seen)
        return True

    def _shrink(self, layer: str, peak: int) -> bool:
        measured, seen = self._opened.sizes.measured(layer), Calibration(peak, TOKENS_OF_PEAK)
        if self._shrinking is None or not peak or measured is None:
            return False
        if not has_room(self._opened.config, measured, seen, self._shrinking.below):
            self._quiet.pop(layer, None)
            return False
        before = self._quiet.get(layer, _Quiet(0, seen))
        quiet = _Quiet(before.steps + 1, seen if seen.exceeds(before.most) else before.most)
        self._quiet[layer] = quiet
        if quiet.steps < self._shrinking.after or not measured.exceeds(fitted(self._opened.config, quiet.most)):
            return False
        self._resize(layer, quiet.most)
        return True

    def _resize(self, layer: str, seen: Calibration) -> None:
        self._opened.resize(layer, fitted(self._opened.config, seen))
        self._quiet.pop(layer, None)
