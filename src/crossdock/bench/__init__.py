"""Measuring exchanges side by side: workloads, contestants, timing in turns, bytes, memory, and records of it all."""

from __future__ import annotations

from .exchanges import Crossdock, Exchange
from .record import Comparison, Measurement, Record, describe_machine
from .side_by_side import Contestant, compare
from .timing import Spread
from .workloads import Inputs, Moved, Workload

__all__ = [
    "Comparison",
    "Contestant",
    "Crossdock",
    "Exchange",
    "Inputs",
    "Measurement",
    "Moved",
    "Record",
    "Spread",
    "Workload",
    "compare",
    "describe_machine",
]
