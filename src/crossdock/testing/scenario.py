"""What a scenario is: a check that the workload grid does not reach, as one function of a seat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .seats import Seat


@dataclass(frozen=True)
class Scenario:
    """One scenario of the suite.

    Attributes:
        group: its check group.
        name: what is checked, in words.
        check: runs it on every rank and raises where something is wrong.
        min_ranks, max_ranks: of a world that it makes sense on.
        needs: traits without which it cannot run, as pairs of name and value.

    """

    group: str
    name: str
    check: Callable[[Seat], None]
    min_ranks: int = 1
    max_ranks: int = 1_000_000
    needs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name
