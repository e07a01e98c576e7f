"""The scenarios of the suite, by topic; `SCENARIOS` is the table of them all."""

from __future__ import annotations

from . import ahead, calls, capacity, compiled, gradients, groups, numerics, recompute, sharing, traffic

SCENARIOS = (
    *numerics.SCENARIOS,
    *groups.SCENARIOS,
    *sharing.SCENARIOS,
    *ahead.SCENARIOS,
    *calls.SCENARIOS,
    *gradients.SCENARIOS,
    *recompute.SCENARIOS,
    *capacity.SCENARIOS,
    *traffic.SCENARIOS,
    *compiled.SCENARIOS,
)

__all__ = ["SCENARIOS"]
