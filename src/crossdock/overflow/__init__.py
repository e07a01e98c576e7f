"""Training steps that lack rows are not applied: a guard around the optimizer's step.

guard     `OverflowGuard`: what happens at the end of a step, in order
agree     how the ranks of several groups find the largest of what each has
groups    which groups these are, and how each of them does; numbered: where the host waits for it
arguments what a guard is made of, checked
apply     one optimizer's step, applied or not, with and without a host synchronisation
scaler    torch's `GradScaler`: its flag, and its state for a step that runs again
sizing    a layer's capacity, made to fit what it was asked for
rng       the state of the random number generators, for a step that runs again
"""

from __future__ import annotations

from .guard import GuardStats, OverflowGuard

__all__ = ["GuardStats", "OverflowGuard"]
