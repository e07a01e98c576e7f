"""Running the cells of a plan: on ranks started here, on threads, or on torchrun's ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from crossdock.errors import ConfigError
from crossdock.testing import (
    Cell,
    CellResult,
    PoolRunner,
    RankPool,
    RanksFailed,
    Runner,
    ThreadRunner,
    run_cell,
    seat_of_process,
    take_device,
    why_unavailable,
)

from .plan import Plan
from .progress import with_progress

_TURN_S = 0.2
_CELL_TIMEOUT_S = 300.0  # compiling on a busy machine is the slowest


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What came out.

    Attributes:
        results: one for each check of each cell: the first rank's that failed, else any rank's.
        seconds: all of it took.

    """

    results: tuple[CellResult, ...]
    seconds: float

    @property
    def all_passed(self) -> bool:
        """Whether nothing failed, and something ran."""
        statuses = {result.status for result in self.results}
        return "failed" not in statuses and "passed" in statuses


def run(plan: Plan) -> Finished | None:
    """Run every cell and return what came out; None on ranks of torchrun that do not report.

    Raises:
        ConfigError: the backend refuses all that its traits offer, for a reason that is no trait.

    """
    start = time.monotonic()
    by_cell = _run_under_torchrun(plan) if plan.torchrun else _run_here(plan)
    if by_cell is None:
        return None
    results = tuple(result for results in by_cell for result in results)
    return Finished(results=results, seconds=time.monotonic() - start)


def _run_here(plan: Plan) -> list[list[CellResult]]:
    """Every one of `jobs` sets of ranks takes the next cell when it is done with one."""
    free: SimpleQueue[Runner] = SimpleQueue()

    def work(cell: Cell) -> list[CellResult]:
        runner = free.get()
        try:
            return _merged(_run_one(runner, plan, cell))
        finally:
            free.put(runner)

    with ThreadPoolExecutor(plan.jobs) as threads, ExitStack() as sets:  # left first, which ends what is under way
        for number in range(plan.jobs):
            runner = sets.enter_context(_runner(plan))
            if number == 0:
                _refuse(_why_unavailable(runner, plan))
            free.put(runner)
        answers = [threads.submit(work, cell) for cell in plan.cells]
        try:
            done: list[list[CellResult]] = []
            with closing(with_progress(plan, done)) as shown:
                for _, answer in zip(shown, answers, strict=True):
                    done.append(_result_of(answer))
            return done
        except BaseException:  # an interrupt: nothing more shall start
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _result_of(answer: Future[list[CellResult]]) -> list[CellResult]:
    """Wait in short turns: an interrupt is noticed between them, whichever thread it has come to."""
    while not wait([answer], timeout=_TURN_S).done:
        pass
    return answer.result()


@contextmanager
def _runner(plan: Plan) -> Iterator[Runner]:
    if plan.in_threads:
        device = torch.device("cuda", 0) if plan.device_type == "cuda" else torch.device("cpu")
        yield ThreadRunner(plan.num_ranks, plan.backend, device)
        return
    with RankPool(plan.num_ranks, backend=plan.group_backend, device_type=plan.device_type) as pool:
        yield PoolRunner(pool, plan.backend)


def _run_one(runner: Runner, plan: Plan, cell: Cell) -> list[list[CellResult]]:
    try:
        return runner(run_cell, cell, plan.traits, timeout_s=_CELL_TIMEOUT_S)
    except RanksFailed as failure:  # a rank died or hung: its pool starts new ones for the next cell
        first_line = str(failure).strip().splitlines()[0]
        return [
            [
                CellResult(
                    group=group,
                    cell=str(cell),
                    rank=result.rank,
                    status="failed",
                    message=first_line,
                    detail=str(failure),
                )
                for group in cell.groups
            ]
            for result in failure.results
            if not result.ok
        ]


def _run_under_torchrun(plan: Plan) -> list[list[CellResult]] | None:
    device = None
    if plan.device_type == "cuda":
        device = take_device(int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", plan.num_ranks)))
    torch.set_num_threads(1)  # as in started ranks: what a CPU adds up can depend on it
    bound = device if plan.group_backend == "nccl" else None
    dist.init_process_group(plan.group_backend, timeout=timedelta(seconds=_CELL_TIMEOUT_S), device_id=bound)
    try:
        seat = seat_of_process(plan.backend, device)
        why: list[str | None] = [None] * seat.size
        dist.all_gather_object(why, why_unavailable(seat, plan.traits))
        _refuse(why)
        mine: list[list[CellResult]] = []
        for cell in with_progress(plan, mine) if seat.rank == 0 else plan.cells:
            mine.append(run_cell(seat, cell, plan.traits))
        by_rank: list[list[list[CellResult]]] = [[] for _ in range(seat.size)]
        dist.all_gather_object(by_rank, mine)
    finally:
        dist.destroy_process_group()
    if seat.rank != 0:
        return None
    return [_merged(list(results)) for results in zip(*by_rank, strict=True)]


def _why_unavailable(runner: Runner, plan: Plan) -> list[str | None]:
    try:
        return runner(why_unavailable, plan.traits, timeout_s=_CELL_TIMEOUT_S)
    except RanksFailed:  # the cells will tell how
        return []


def _refuse(why: list[str | None]) -> None:
    """Raise a refusal of any rank: nothing could pass."""
    if refusal := next(filter(None, why), None):
        raise ConfigError(refusal)


def _merged(by_rank: list[list[CellResult]]) -> list[CellResult]:
    """One result for each check, from one list a rank: a failure where there is one."""
    if not by_rank:
        raise ConfigError("no rank answered")
    return [next((r for r in results if r.status == "failed"), results[0]) for results in zip(*by_rank, strict=True)]
