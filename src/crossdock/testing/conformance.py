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

import torch

from .. import Backend, DispatcherConfig, explain
from ..backends.base import BackendTraits
from ..backends.loopback import LoopbackGroup
from ..errors import ConfigError
from .checks import CHECKS, Trial, try_problem
from .scenario import Scenario
from .scenarios import SCENARIOS
from .seats import Seat
from .workloads import Workload, kind_of_capacity, pairwise_grid, rest_of_pairs, whole_grid

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
    if traits is not None and full:
        grid += _exact_instead(grid, traits, device_type)
    elif traits is not None:
        ran = [workload for workload in grid if missing_trait(Cell(workload), traits, device_type) is None]
        rest = rest_of_pairs(ran, ep_size, traits, device_type)
        grid += [workload for workload in rest if missing_trait(Cell(workload), traits, device_type) is None]
    scenarios = [scenario for scenario in SCENARIOS if scenario.min_ranks <= ep_size <= scenario.max_ranks]
    return [*map(Cell, grid), *map(Cell, scenarios)]


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
    """Run one cell on this rank: one result for each of its check groups. Collective over the seat's world."""
    missing = missing_trait(cell, traits, seat.device.type)
    if missing is not None:
        return [_result(group, cell, seat, "skipped", missing) for group in cell.groups]
    if isinstance(cell.what, Workload):
        return _run_workload(seat, cell, cell.what, traits)
    scenario = cell.what
    return [_report(scenario.group, cell, seat, lambda: scenario.check(seat))]


def traits_of(backend: str | Backend) -> BackendTraits:
    """The traits of a backend, which is named or given.

    Raises:
        ConfigError: no backend has this name.

    """
    if not isinstance(backend, str):
        return backend.traits
    config = DispatcherConfig(num_experts=1, top_k=1, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=1)
    traits = {candidate.name: candidate.traits for candidate in explain(config, LoopbackGroup(1).member(0)).candidates}
    if backend not in traits:
        raise ConfigError(f"unknown backend {backend!r}; known are {', '.join(map(repr, traits))}")
    return traits[backend]


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
    workload, problem = cell.what, cell.what.problem()
    top_k, hidden_dim = problem.config.top_k, problem.config.hidden_dim
    wants = (
        ("reductions", workload.reduction in traits.reductions, workload.reduction),
        ("row_capacities", problem.config.row_capacity.kind in traits.row_capacities, str(problem.config.row_capacity)),
        (
            "sync_free_devices",
            traits.offers(problem.config.row_capacity.kind, device_type),
            f"{problem.config.row_capacity} on {device_type}",
        ),
        ("dtypes", workload.dtype in traits.dtypes, str(workload.dtype)),
        (
            "duplicate_experts",
            traits.duplicate_experts or not workload.repeats_experts,
            "a token names an expert twice",
        ),
        ("max_top_k", traits.max_top_k is None or top_k <= traits.max_top_k, f"top_k is {top_k}"),
        ("hidden_multiple", hidden_dim % traits.hidden_multiple == 0, f"hidden_dim is {hidden_dim}"),
        (
            "ordered_rows",
            traits.ordered_rows or workload.experts != "swiglu",
            "a product's bits depend on the row order",
        ),
    )
    return next((f"{name}: {why}" for name, offered, why in wants if not offered), None)


def _values(traits: BackendTraits, name: str) -> Any:
    value = getattr(traits, name)
    return value if isinstance(value, frozenset) else (value,)


def _run_workload(seat: Seat, cell: Cell, workload: Workload, traits: BackendTraits) -> list[CellResult]:
    trials: list[Trial] = []

    def solve() -> None:
        trial = try_problem(seat, workload.problem(), ordered_rows=traits.ordered_rows)
        assert trial is not None, "every rank is in the group of all ranks"
        trials.append(trial)

    run = _report("run", cell, seat, solve)
    if not trials:  # no check can be made of what did not come to its end
        return [_result(group, cell, seat, run.status, run.message, run.detail) for group in cell.groups]
    return [_report(group, cell, seat, partial(check, trials[0])) for group, check in CHECKS.items()]


def _report(group: str, cell: Cell, seat: Seat, attempt: Callable[[], None]) -> CellResult:
    try:
        attempt()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as fault:  # noqa: BLE001  # whatever a backend raises is this cell's result, and the suite goes on
        first_line = (str(fault).strip() or "no message").splitlines()[0]
        message = first_line if isinstance(fault, AssertionError) else f"{type(fault).__name__}: {first_line}"
        return _result(group, cell, seat, "failed", message, "".join(traceback.format_exception(fault)))
    return _result(group, cell, seat, "passed")


def _result(group: str, cell: Cell, seat: Seat, status: Status, message: str = "", detail: str = "") -> CellResult:
    return CellResult(group=group, cell=str(cell), rank=seat.rank, status=status, message=message, detail=detail)
