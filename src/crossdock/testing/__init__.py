"""What tests of a dispatcher need: ranks, comparisons to the bit or by a baseline, and the conformance suite."""

from __future__ import annotations

from ..backends.loopback import LoopbackGroup
from ._rank import take_device
from ._world import RankResult
from .checks import check_problem
from .compare import assert_bit_equal, assert_within_baseline
from .conformance import Cell, CellResult, conformance_cells, run_cell, why_unavailable
from .problems import Problem
from .ranks import RankPool, RanksFailed, StartedRanks, run_ranks, start_ranks
from .seats import PoolRunner, Runner, Seat, ThreadRunner, seat_of_process, traits_of
from .workloads import Workload

__all__ = [
    "Cell",
    "CellResult",
    "LoopbackGroup",
    "PoolRunner",
    "Problem",
    "RankPool",
    "RankResult",
    "RanksFailed",
    "Runner",
    "Seat",
    "StartedRanks",
    "ThreadRunner",
    "Workload",
    "assert_bit_equal",
    "assert_within_baseline",
    "check_problem",
    "conformance_cells",
    "run_cell",
    "run_ranks",
    "seat_of_process",
    "start_ranks",
    "take_device",
    "traits_of",
    "why_unavailable",
]
