"""Running a plan: on ranks started here, or on torchrun's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from crossdock.bench.movements.ceilings import Ceilings
from crossdock.bench.movements.cells import ceilings_here, field_here, measure
from crossdock.bench.movements.checking import WrongResult
from crossdock.bench.movements.contenders import Contender
from crossdock.bench.movements.figures import Figure
from crossdock.bench.movements.workloads import Workload
from crossdock.errors import ConfigError, CrossdockError
from crossdock.testing import RankPool, RanksFailed

from ..failures import WRONG_VALUE, exit_code_of, sentence_of
from ..progress import Stages, stages
from .plan import Place, Plan
from .sizes import Job

Result = TypeVar("Result")

_CELL_TIMEOUT_S = 300.0


class Stopped(RuntimeError):
    """A backend moved something wrong: nothing more is measured."""


@dataclass(kw_only=True)
class Finished:
    """What came out.

    Attributes:
        ceilings: of this machine.
        figures: everything measured.
        refused: why backends could not serve, by name.
        failed: contenders that failed while they were measured, and why.
        seconds: all of it took.
    """

    ceilings: Ceilings
    figures: list[Figure] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Ranks(Protocol):
    """Runs `fn(rank, *args)` on every rank and returns a result that is every rank's."""

    def __call__(self, fn: Callable[..., Result], *args: object) -> Result:
        """Raises what the function raised, or RanksFailed."""


def run(plan: Plan) -> Finished | None:
    """Measure everything; None on ranks of torchrun that do not report.

    Raises:
        Stopped: see there.
        ConfigError: a value that turned out not to work on the ranks.
    """
    start = time.monotonic()
    with ranks_at(plan.place) as (ranks, reports), stages("bench", reports) as told:
        finished = _measure_all(plan, ranks, told)
    finished.seconds = time.monotonic() - start
    return finished if reports else None


def _measure_all(plan: Plan, ranks: Ranks, told: Stages) -> Finished:
    refused = dict[str, str]()
    cells = []
    for job in plan.jobs:
        told.begin(f"who can serve {job.workload.name}")
        cells += [(job.workload, contender) for contender in _contenders(plan, job, ranks, refused)]
    if not cells:
        why = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"no backend can serve any workload here: {why}")
    told.begin("ceilings of links and memory")
    finished = Finished(ceilings=ranks(ceilings_here), refused=refused)
    told.expect(len(cells))
    for workload, contender in cells:
        told.begin(f"{workload.name}, {workload.routing}: {contender.backend}")
        _measure_one(plan, ranks, workload, contender, finished)
        told.end()
    return finished


def _contenders(plan: Plan, job: Job, ranks: Ranks, refused: dict[str, str]) -> tuple[Contender, ...]:
    field = ranks(field_here, job.workload, plan.backends, plan.capacities, plan.reductions, (job.num_sms,))
    refused.update(field.refused)
    return field.contenders


def _measure_one(plan: Plan, ranks: Ranks, workload: Workload, contender: Contender, finished: Finished) -> None:
    who = f"{contender.backend}, {contender.capacity.kind} rows, {contender.reduction}, on {workload.name}"
    try:
        finished.figures += ranks(measure, workload, contender, finished.ceilings, plan.effort)
    except WrongResult as wrong:
        raise Stopped(f"{who} is wrong and was not timed: {wrong}") from None
    except CrossdockError as error:
        finished.failed[who] = str(error)
    except RanksFailed as failure:  # the pool has fresh ranks for the next cell
        failed = [result for result in failure.results if not result.ok]
        wrongs = [result for result in failed if result.error_type == WrongResult.__name__]
        if wrongs:
            raise Stopped(f"{who} is wrong and was not timed: {wrongs[0].message}") from None
        finished.failed[who] = sentence_of(failure)


def ranks_at(place: Place) -> AbstractContextManager[tuple[Ranks, bool]]:
    """What runs functions on all ranks for the time of a `with`, and whether this process reports."""
    return _torchrun_ranks(place) if place.torchrun else _started_ranks(place)


@contextmanager
def _started_ranks(place: Place) -> Iterator[tuple[Ranks, bool]]:
    with RankPool(place.num_ranks, backend="nccl" if place.device_type == "cuda" else "gloo") as pool:

        def call(fn: Callable[..., Result], *args: object) -> Result:
            try:
                return pool.run(fn, *args, timeout_s=_CELL_TIMEOUT_S)[0]
            except RanksFailed as failure:
                if exit_code_of(failure) == WRONG_VALUE:
                    raise ConfigError(sentence_of(failure)) from None
                raise

        yield call, True


@contextmanager
def _torchrun_ranks(place: Place) -> Iterator[tuple[Ranks, bool]]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if place.device_type == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # as in started ranks
    backend = "gloo" if device is None else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=_CELL_TIMEOUT_S), device_id=device)
    try:

        def call(fn: Callable[..., Result], *args: object) -> Result:
            return fn(dist.get_rank(), *args)

        yield call, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
