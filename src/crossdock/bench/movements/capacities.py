"""Row capacities as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ... import RowCapacity
from ...errors import ConfigError
from .problems import Problem

CAPACITIES = ("exact", "worst_case", "balanced", "rows")
_NEEDS_VALUE = ("balanced",)
_ROUND_ROWS_TO = 128


@dataclass(frozen=True)
class CapacityChoice:
    """A row capacity as it was asked for; `rows` without a number is what the routing is known to need."""

    kind: str
    value: float | None = None

    @classmethod
    def parse(cls, text: str) -> CapacityChoice:
        """`exact`, `worst_case`, `worst_case:0.5`, `balanced:1.5`, `rows` or `rows:4096`.

        Raises:
            ConfigError: anything else.
        """
        kind, colon, number = text.partition(":")
        try:
            value = float(number) if colon else None
        except ValueError:
            raise ConfigError(f"--capacity {text!r} has no number behind the colon") from None
        if kind not in CAPACITIES or (kind in _NEEDS_VALUE and value is None):
            raise ConfigError(f"--capacity must be exact, worst_case, balanced:FACTOR, rows or rows:N, got {text!r}")
        choice = cls(kind, value)
        choice.of(1)  # the value's own limits
        return choice

    def of(self, num_rows_needed: int) -> RowCapacity:
        """The capacity for a routing that needs so many rows on one rank."""
        if self.kind == "rows":
            needed = -(-max(num_rows_needed, 1) // _ROUND_ROWS_TO) * _ROUND_ROWS_TO
            return RowCapacity.rows(needed if self.value is None else int(self.value))
        if self.kind == "worst_case":
            return RowCapacity.worst_case(1.0 if self.value is None else self.value)
        if self.kind == "balanced":
            assert self.value is not None  # parsed
            return RowCapacity.balanced(self.value)
        if self.value is not None:
            raise ConfigError(f"--capacity exact takes no number, got {self.value:g}")
        return RowCapacity.exact()

    def holds(self, problem: Problem) -> bool:
        """Whether every row of the problem surely fits."""
        workload, needed = problem.workload, problem.num_rows_needed
        slots = workload.num_tokens * workload.top_k
        fits = {
            "exact": True,
            "worst_case": slots * problem.ep_size * (self.value or 1.0) >= needed,
            "balanced": slots * (self.value or 1.0) >= needed,
            "rows": self.value is None or self.value >= needed,
        }
        return fits[self.kind]
