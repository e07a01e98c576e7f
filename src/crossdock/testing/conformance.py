"""The conformance suite: a table of cells, each one check of one workload or one scenario, run on every rank.

    for cell in conformance_cells(2, traits=backend.traits):        # on every rank, in this order
        results += run_cell(seat, cell, backend.traits)

Nothing but a trait that a backend states can skip a cell, and the skip names it. Further cells make up for the pairs of
values that it offers and that only skipped cells have. The suite needs no pytest; the contract tests and `crossdock
verify` both run it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from .. import explain
from ..backends.base import BackendTraits
from .checks import CHECKS, Trial, try_problem
from .scenario import Scenario
from .scenarios import SCENARIOS
from .seats import Seat
from .workloads import NotOffered, Workload, kind_of_capacity, pairwise_grid, rest_of_pairs, whole_grid

Status = Literal["passed", "skipped", "failed"]


@dataclass(frozen=True)
class Cell:
    """One run of the suite: a workload with all checks of it, or a scenario."""

    what: Workload | Scenario

    def __str__(self) -> str:
        return str(self.what)

    @property
    def groups(self) -> tuple[str, ...]:
        """The check groups that it reports to."""
        return tuple(CHECKS) if isinstance(self.what, Workload) else (self.what.group,)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """How one check of one cell ended on one rank.

    Attributes:
        group: the check group.
        cell: what was run, in words.
        rank: where.
        status: passed, skipped or failed.
        message: the trait that skipped it, or the first line of what went wrong.
        detail: the traceback of a failure, else "".

    """

    group: str
    cell: str
    rank: int
    status: Status
    message: str = ""
    detail: str = ""


def conformance_cells(
    ep_size: int, *, full: bool = False, traits: BackendTraits | None = None, device_type: str = "cpu"
) -> list[Cell]:
    """Every cell for a group size: the workload grid (pairs of its values, or all of it) and the scenarios.

    With the traits of a backend also those that stand in, on a device type, for cells that it cannot run: what is left
    covers every pair of values that it offers, or all of them. A backend that offers everything has none of these.
    """
    grid = list(whole_grid(ep_size) if full else pairwise_grid(ep_size))
    if traits is not None:
        grid = [workload.fitted(traits) for workload in grid]
        grid += _exact_instead(grid, traits, device_type) if full else _further_pairs(grid, traits, device_type)
    scenarios = [scenario for scenario in SCENARIOS if scenario.min_ranks <= ep_size <= scenario.max_ranks]
    return [*map(Cell, grid), *map(Cell, scenarios)]


def _further_pairs(grid: list[Workload], traits: BackendTraits, device_type: str) -> list[Workload]:
    """Workloads that a backend can run, for the pairs that only those have which it cannot."""
    ran = [workload for workload in grid if workload.missing_trait(traits, device_type) is None]
    rest = [workload.fitted(traits) for workload in rest_of_pairs(ran, grid[0].ep_size, traits, device_type)]
    return [workload for workload in rest if workload.missing_trait(traits, device_type) is None]


def _exact_instead(grid: list[Workload], traits: BackendTraits, device_type: str) -> list[Workload]:
    """The workloads whose capacity is not offered, with the one that always is."""
    return [
        replace(workload, capacity="exact")
        for workload in grid
        if not traits.offers(kind_of_capacity(workload.capacity, workload.alignment), device_type)
    ]


def why_unavailable(seat: Seat, traits: BackendTraits) -> str | None:
    """Why the backend that a seat names refuses every workload that its traits offer, in a sentence.

    Local: asks no other rank once the group is there, and opens nothing. None if it takes any workload, if its traits
    offer none, or if the seat has a `Backend` instead of a name.
    """
    group, why = seat.group(), None
    for cell in conformance_cells(seat.size, traits=traits, device_type=seat.device.type):
        if isinstance(cell.what, Workload) and missing_trait(cell, traits, seat.device.type) is None:
            candidates = explain(cell.what.problem().config, group, device=seat.device).candidates
            refused = next((each.why_not for each in candidates if each.name == seat.backend), None)
            if refused is None:
                return None
            why = why or f"backend {seat.backend!r} is not available here: {refused}"
    return why


def run_cell(seat: Seat, cell: Cell, traits: BackendTraits) -> list[CellResult]:
    """Run one cell on this rank: one result for each of its check groups. Collective over the seat's world.

    A workload is run as the traits want it, see `Workload.fitted`.
    """
    if isinstance(cell.what, Workload):
        cell = Cell(cell.what.fitted(traits))
    missing = missing_trait(cell, traits, seat.device.type)
    if missing is not None:
        return [_result(group, cell, seat, "skipped", missing) for group in cell.groups]
    if isinstance(cell.what, Workload):
        return _run_workload(seat, cell, cell.what)
    scenario = cell.what
    try:
        return [_report(scenario.group, cell, seat, lambda: scenario.check(seat))]
    except NotOffered as missing:
        return [_result(scenario.group, cell, seat, "skipped", str(missing))]


def missing_trait(cell: Cell, traits: BackendTraits, device_type: str = "cpu") -> str | None:
    """Which trait keeps a backend from running a cell on a device, with its value; None if none does."""
    if isinstance(cell.what, Scenario):
        wanting = [
            f"{name}: it needs {value!r}" for name, value in cell.what.needs if value not in _values(traits, name)
        ]
        wanting += [
            f"sync_free_devices: it needs {device_type!r} for row_capacity {value}"
            for name, value in cell.what.needs
            if name == "row_capacities" and not traits.offers(value, device_type)
        ]
        return wanting[0] if wanting else None
    return cell.what.missing_trait(traits, device_type)


def _values(traits: BackendTraits, name: str) -> Any:
    value = getattr(traits, name)
    return value if isinstance(value, frozenset) else (value,)


def _run_workload(seat: Seat, cell: Cell, workload: Workload) -> list[CellResult]:
    trials: list[Trial] = []

    def solve() -> None:
        trial = try_problem(seat, workload.problem())
        assert trial is not None, "every rank is in the group of all ranks"
        trials.append(trial)

    run = _report("run", cell, seat, solve)
    if not trials:  # no check can be made of what did not come to its end
        return [_result(group, cell, seat, run.status, run.message, run.detail) for group in cell.groups]
    return [_report(group, cell, seat, partial(check, trials[0])) for group, check in CHECKS.items()]


def _report(group: str, cell: Cell, seat: Seat, attempt: Callable[[], None]) -> CellResult:
    try:
        attempt()
    except (KeyboardInterrupt, SystemExit, NotOffered):
        raise
    except BaseException as fault:  # noqa: BLE001  # whatever a backend raises is this cell's result, and the suite goes on
        first_line = (str(fault).strip() or "no message").splitlines()[0]
        message = first_line if isinstance(fault, AssertionError) else f"{type(fault).__name__}: {first_line}"
        return _result(group, cell, seat, "failed", message, "".join(traceback.format_exception(fault)))
    return _result(group, cell, seat, "passed")


def _result(group: str, cell: Cell, seat: Seat, status: Status, message: str = "", detail: str = "") -> CellResult:
    return CellResult(group=group, cell=str(cell), rank=seat.rank, status=status, message=message, detail=detail)
