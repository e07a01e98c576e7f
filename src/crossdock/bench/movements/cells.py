"""What runs on every rank: the ceilings, the field of contenders, and one contender in one workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...testing import seat_of_process
from ...types import Reduction
from .capacities import CapacityChoice
from .ceilings import Ceilings, measure_ceilings
from .checking import check
from .clock import Clock
from .contenders import Contender, Field, find_contenders
from .cuda_clock import clock_of
from .figures import Figure, RankFigures, put_together
from .group import agree
from .operations import COMBINE_BACKWARD, COMBINE_BACKWARD_NO_SCORES, DISPATCH, PAIR, Opened
from .problems import Problem
from .traffic import Traffic, traffic_of
from .workloads import Workload

_OUTWARD = (DISPATCH, COMBINE_BACKWARD, COMBINE_BACKWARD_NO_SCORES)
_SMALL_CALLS = 20  # in one graph; of large workloads each set once


@dataclass(frozen=True)
class Effort:
    """How often everything is repeated: `repeats` in each of `runs`."""

    repeats: int
    runs: int


def ceilings_here(rank: int) -> Ceilings:
    """Measure what this machine can do. Collective."""
    with _device_of_rank() as device:
        return measure_ceilings(clock_of(device))


def field_here(
    rank: int,
    workload: Workload,
    backends: Sequence[str],
    capacities: Sequence[CapacityChoice],
    reductions: Sequence[Reduction],
    num_sms: Sequence[int | None],
) -> Field:
    """Who can take part in a workload; see `find_contenders`."""
    with _device_of_rank() as device:
        problem = _problem(workload, device)
        return find_contenders(problem, backends, capacities, reductions, num_sms)


def measure(rank: int, workload: Workload, contender: Contender, ceilings: Ceilings, effort: Effort) -> list[Figure]:
    """Check one contender in one workload, then time all its operations. Collective.

    Raises:
        WrongResult: nothing was timed.
        CrossdockError: a call failed.
    """
    with _device_of_rank() as device:
        problem = _problem(workload, device)
        with Opened(contender, problem) as opened:
            check(opened)
            mine = _figures(opened, clock_of(device), effort)
        by_rank = agree(mine)
    traffic = {name: _traffic(problem, name) for name, _ in mine.times_us}
    return put_together(workload, contender, by_rank, traffic, ceilings)


def _problem(workload: Workload, device: torch.device) -> Problem:
    return Problem(workload, dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def _device_of_rank() -> Iterator[torch.device]:
    """The device of this rank; on a GPU work goes to a stream of its own, as capturing demands, backward included."""
    device = seat_of_process("auto").device
    if device.type != "cuda":
        yield device
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _figures(opened: Opened, clock: Clock, effort: Effort) -> RankFigures:
    figures = RankFigures(
        capacity=str(opened.dispatcher.config.row_capacity),
        persistent_bytes=opened.workspace_bytes,
        opening_bytes=opened.opening_bytes,
        interpreted=opened.contender.is_interpreted(opened.problem.device.type),
    )
    for name, operation in opened.operations.items():
        peak = clock.peak_bytes(operation)
        if peak is not None:
            figures.peak_bytes[name] = peak
        _note_host(figures.host_us, name, clock, operation)
    for name, operation in opened.operations_with_grad.items():
        _note_host(figures.host_grad_us, name, clock, operation)
    for _ in range(effort.runs):
        for name, operation in opened.operations.items():
            _time(opened, figures, clock, name, operation, effort.repeats)
    return figures


def _time(
    opened: Opened, figures: RankFigures, clock: Clock, name: str, operation: Callable[[int], Any], repeats: int
) -> None:
    """One run of one operation, eager and, where it can be, in a graph."""
    figures.times_us.setdefault((name, "eager"), []).append(clock.eager(operation, repeats))
    opened.dispatcher.check()
    if not opened.capturable or name in figures.no_graph:
        return
    calls = _SMALL_CALLS if opened.problem.workload.is_decode else opened.problem.num_sets
    failure, replay = "", None
    try:
        replay = clock.capture(operation, calls)
    except RuntimeError as error:
        failure = str(error).strip().partition("\n")[0]
    told = [failure for failure in agree(failure) if failure]
    opened.dispatcher.check()
    if told:
        figures.no_graph[name] = told[0]
    elif replay is not None:
        times = clock.eager(lambda _: replay(), repeats)
        figures.times_us.setdefault((name, "graph"), []).append([taken / calls for taken in times])
        opened.dispatcher.check()


def _note_host(into: dict[str, float], name: str, clock: Clock, operation: Callable[[int], Any]) -> None:
    host_us = clock.host(operation)
    if host_us is not None:
        into[name] = host_us


def _traffic(problem: Problem, operation: str) -> tuple[Traffic, ...]:
    """Of each movement that the operation makes, one after the other."""
    if operation == PAIR:
        return traffic_of(problem, "out"), traffic_of(problem, "home")
    return (traffic_of(problem, "out" if operation in _OUTWARD else "home"),)
