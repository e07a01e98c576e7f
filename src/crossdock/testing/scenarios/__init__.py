"""The scenarios of the suite, by topic; `SCENARIOS` is the table of them all."""

from __future__ import annotations

from . import calls, compiled, gradients, groups, numerics, sharing

SCENARIOS = (
    *numerics.SCENARIOS,
    *groups.SCENARIOS,
    *sharing.SCENARIOS,
    *calls.SCENARIOS,
    *gradients.SCENARIOS,
    *compiled.SCENARIOS,
)

__all__ = ["SCENARIOS"]
