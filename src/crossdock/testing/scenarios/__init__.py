"""The scenarios of the suite, by topic; `SCENARIOS` is the table of them all."""

from __future__ import annotations

from . import calls, capacity, compiled, gradients, groups, numerics, recompute, sharing

SCENARIOS = (
    *numerics.SCENARIOS,
    *groups.SCENARIOS,
    *sharing.SCENARIOS,
    *calls.SCENARIOS,
    *gradients.SCENARIOS,
    *recompute.SCENARIOS,
    *capacity.SCENARIOS,
    *compiled.SCENARIOS,
)

__all__ = ["SCENARIOS"]
