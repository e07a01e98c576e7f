"""The suite itself: it covers every pair, skips by traits alone, and finds backends that are wrong."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.backends.base import Backend, BackendTraits, Link, Transport, TransportSpec
from crossdock.backends.loopback import LoopbackBackend
from crossdock.permute import SlotMap
from crossdock.testing import (
    Cell,
    CellResult,
    ThreadRunner,
    Workload,
    conformance_cells,
    run_cell,
    traits_of,
    why_unavailable,
)
from crossdock.testing.conformance import missing_trait
from crossdock.testing.pairwise import every_pair
from crossdock.testing.routings import ROUTINGS
from crossdock.testing.scenario import Scenario
from crossdock.testing.workloads import FACTORS, whole_grid


def test_every_pair_of_values_occurs_and_few_rows_do_it():
    rows = every_pair(FACTORS)
    for a, b in combinations(FACTORS, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in FACTORS[a] for y in FACTORS[b]}
    assert len(rows) <= 1.5 * len(ROUTINGS) * len(FACTORS["alignment"])
    assert rows == every_pair(FACTORS)


@pytest.mark.parametrize("factors", [{"a": (1, 2)}, {"a": (1,), "b": (2,)}, {}], ids=str)
def test_covering_arrays_of_next_to_nothing(factors: dict[str, tuple[int, ...]]):
    assert len(every_pair(factors)) == (1 if len(factors) == 2 else 0)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_workloads_are_all_different_and_always_the_same(ep_size: int):
    cells = conformance_cells(ep_size)
    assert len({str(cell) for cell in cells}) == len(cells)
    assert len(list(whole_grid(ep_size))) == 11 * 3 * 4 * 2 * 3 * 2 * 2
    workload = Workload(ep_size=ep_size, routing="skewed")
    again = Workload(ep_size=ep_size, routing="skewed")
    assert workload.seed == again.seed
    assert workload.seed != Workload(ep_size=ep_size, routing="skewed", alignment=16).seed


WANTING: dict[str, tuple[dict[str, Any], Workload]] = {
    "reductions": ({"reductions": frozenset({"fast"})}, Workload(ep_size=2, routing="skewed", reduction="exact")),
    "dtypes": ({"dtypes": frozenset({torch.bfloat16})}, Workload(ep_size=2, routing="skewed")),
    "row_capacities": (
        {"row_capacities": frozenset({"exact"})},
        Workload(ep_size=2, routing="skewed", capacity="balanced"),
    ),
    "sync_free_devices": (
        {"sync_free_devices": frozenset({"cuda"})},
        Workload(ep_size=2, routing="skewed", capacity="rows"),
    ),
    "duplicate_experts": ({"duplicate_experts": False}, Workload(ep_size=2, routing="duplicates")),
    "max_top_k": ({"max_top_k": 2}, Workload(ep_size=2, routing="skewed")),
    "hidden_multiple": ({"hidden_multiple": 16}, Workload(ep_size=2, routing="skewed")),
    "ordered_rows": ({"ordered_rows": False}, Workload(ep_size=2, routing="skewed", experts="swiglu")),
}


@pytest.mark.parametrize("name", WANTING)
def test_a_trait_skips_a_cell_and_is_named(name: str):
    changes, workload = WANTING[name]
    traits = traits_of("loopback")
    assert missing_trait(Cell(workload), traits) is None
    skipped = missing_trait(Cell(workload), dataclasses.replace(traits, **changes))
    assert skipped is not None and skipped.startswith(f"{name}: ")


def test_scenarios_name_the_trait_that_they_need():
    traits = dataclasses.replace(traits_of("loopback"), reductions=frozenset({"fast"}))
    skipped = {str(cell): why for cell in conformance_cells(2) if (why := missing_trait(cell, traits)) is not None}
    assert "EP 1 on all tokens and this group on its parts agree to the bit" in skipped
    assert set(skipped.values()) == {"reductions: exact", "reductions: it needs 'exact'"}


def test_unknown_backends_have_no_traits():
    with pytest.raises(cd.ConfigError, match="unknown backend 'typo'"):
        traits_of("typo")


LESS: dict[str, dict[str, Any]] = {
    "exact alone": {"row_capacities": frozenset({"exact"})},
    "exact alone on this device": {"sync_free_devices": frozenset({"cuda"})},
    "no number of rows": {"row_capacities": frozenset({"exact", "worst_case", "balanced"})},
    "no balanced rows": {"row_capacities": frozenset({"exact", "rows"})},
    "two dtypes, exact alone": {
        "dtypes": frozenset({torch.bfloat16, torch.float32}),
        "row_capacities": frozenset({"exact"}),
    },
    "hardly anything": {
        "dtypes": frozenset({torch.bfloat16}),
        "row_capacities": frozenset({"exact"}),
        "reductions": frozenset({"fast"}),
        "duplicate_experts": False,
        "ordered_rows": False,
        "max_top_k": 2,
    },
}


@pytest.mark.parametrize("ep_size", [1, 2, 3])
@pytest.mark.parametrize("less", LESS)
def test_every_pair_that_a_backend_offers_is_run(less: str, ep_size: int):
    traits = dataclasses.replace(LoopbackBackend.traits, **LESS[less])
    cells = conformance_cells(ep_size, traits=traits)
    assert len({str(cell) for cell in cells}) == len(cells)
    usual = [
        Cell(cell.what.fitted(traits)) if isinstance(cell.what, Workload) else cell
        for cell in conformance_cells(ep_size)
    ]
    assert [cell for cell in cells if cell in usual] == usual
    run = [cell.what for cell in cells if isinstance(cell.what, Workload) and missing_trait(cell, traits) is None]
    assert {workload.dtype for workload in run} == traits.dtypes & set(FACTORS["dtype"])
    for a, b in combinations(FACTORS, 2):
        pairs = {(getattr(workload, a), getattr(workload, b)) for workload in run}
        lacking = {(x, y) for x, _ in pairs for _, y in pairs} - pairs
        too_small = {a, b} == {"alignment", "capacity"}  # by alignment it is of a kind that is offered, or is not
        assert {pair for pair in lacking if not (too_small and "too small" in pair)} == set()


def test_a_backend_that_can_run_no_workload_has_no_cells_of_its_own():
    traits = dataclasses.replace(LoopbackBackend.traits, dtypes=frozenset())
    assert conformance_cells(2, traits=traits) == conformance_cells(2)


@pytest.mark.parametrize("full", [False, True], ids=["pairs", "full"])
def test_a_backend_that_offers_everything_has_no_cells_of_its_own(full: bool):
    cells = conformance_cells(2, full=full)
    assert conformance_cells(2, full=full, traits=LoopbackBackend.traits) == cells


def test_the_whole_grid_has_every_choice_that_a_backend_offers():
    traits = dataclasses.replace(LoopbackBackend.traits, row_capacities=frozenset({"exact"}))
    cells = conformance_cells(1, full=True, traits=traits)
    exact = [cell.what for cell in cells if isinstance(cell.what, Workload) and cell.what.capacity == "exact"]
    assert len(set(exact)) == len(exact) == len(list(whole_grid(1)))


def of_one_rank(how: str) -> Backend:
    """The backend of the page for authors of backends, bent in some cells."""
    names: dict[str, Any] = {"__name__": "page"}
    page = (Path(__file__).parents[2] / "docs" / "adding-a-backend.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], names)

    transport_class: Any = names["OneRankTransport"]
    backend_class: Any = names["OneRankBackend"]

    class BentTransport(transport_class):  # type: ignore[misc]
        def bends(self, what: str, rows: torch.Tensor) -> bool:
            return how == what and rows.dtype == torch.float32 and self.spec.expert_alignment in (32, 128)

        def rows_home(self, rows: torch.Tensor, weights: Any, layout: Any, call: Any) -> torch.Tensor:
            home: torch.Tensor = super().rows_home(rows, weights, layout, call)
            return home * 2 if self.bends("doubled", rows) else home

        def rows_out(self, x: torch.Tensor, layout: Any, call: Any) -> torch.Tensor:
            rows: torch.Tensor = super().rows_out(x, layout, call)
            padding = SlotMap(*layout).slot_of_row < 0
            return rows.masked_fill(padding.unsqueeze(1), 7.0) if self.bends("dirty padding", rows) else rows

    class BentBackend(backend_class):  # type: ignore[misc]
        def open(self, spec: TransportSpec, link: Link) -> Transport:
            return BentTransport(spec)

    made: Backend = BentBackend()
    return made


@pytest.mark.parametrize(("how", "groups"), [("doubled", {"output"}), ("dirty padding", {"rows"}), ("nowhere", set())])
def test_a_backend_of_exact_capacity_alone_is_found_out_by_pairs(how: str, groups: set[str]):
    backend = of_one_rank(how)
    cells = conformance_cells(1, traits=backend.traits)
    results = [result for cell in cells if isinstance(cell.what, Workload) for result in run(backend, cell.what)]
    failed = {result.group for result in results if result.status == "failed"}
    assert failed >= groups and bool(failed) == bool(groups)
    assert "passed" in {result.status for result in results}


def test_a_refusal_that_no_trait_tells_is_told_before_all_cells():
    traits = traits_of("local")
    sentence = "backend 'local' is not available here: it serves one rank, and this group has 2"
    assert ThreadRunner(1, "local")(why_unavailable, traits) == [None]
    assert ThreadRunner(2, "local")(why_unavailable, traits) == [sentence] * 2
    assert ThreadRunner(2, "loopback")(why_unavailable, traits_of("loopback")) == [None] * 2


class Bent(Backend):
    """A loopback whose transport is bent somewhere."""

    name = "bent"
    traits = LoopbackBackend.traits

    def __init__(self, how: str, traits: BackendTraits | None = None) -> None:
        self.how = how
        if traits is not None:
            self.traits = traits

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        transport = LoopbackBackend().open(spec, link)
        for name in ("dispatch", "rows_home", "combine_backward", "scalars_home"):
            if self.how.startswith(name):
                setattr(transport, name, bent(self.how, getattr(transport, name)))
        return transport


def bent(how: str, movement: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        result = movement(*arguments)
        if how == "dispatch: rows swapped" and len(result.rows) > 1:
            result = result._replace(rows=result.rows.flip(0))
        elif how == "dispatch: dirty padding":
            result = result._replace(rows=result.rows.masked_fill(result.row_scores.unsqueeze(1) == 0, 1.0))
        elif how == "dispatch: offsets in int64":
            result = result._replace(expert_offsets=result.expert_offsets.long())
        elif how == "rows_home: last bit":
            result = torch.nextafter(result.float(), torch.tensor(9e9)).to(result.dtype)
        elif how == "combine_backward: doubled":
            result = (result[0] * 2, result[1])
        elif how == "scalars_home: lost":
            result = torch.zeros_like(result)
        return result

    return wrong


def run(backend: Backend, workload: Workload) -> list[CellResult]:
    runner = ThreadRunner(workload.ep_size, backend)
    return [result for rank in runner(run_cell, Cell(workload), backend.traits) for result in rank]


@pytest.mark.parametrize(
    ("how", "group"),
    [
        ("dispatch: rows swapped", "rows"),
        ("dispatch: dirty padding", "rows"),
        ("dispatch: offsets in int64", "rows"),
        ("rows_home: last bit", "output"),
        ("combine_backward: doubled", "gradients"),
        ("scalars_home: lost", "gradients"),
    ],
)
def test_a_bent_backend_is_found_out(how: str, group: str):
    workload = Workload(ep_size=2, routing="skewed", alignment=16)
    failed = {result.group for result in run(Bent(how), workload) if result.status == "failed"}
    assert group in failed
    assert not [result for result in run(Bent("nowhere"), workload) if result.status != "passed"]


def test_a_backend_that_sends_copies_is_found_out():
    class Copies(LoopbackBackend):
        def open(self, spec: TransportSpec, link: Link) -> Transport:
            transport = super().open(spec, link)
            sent = transport.sent
            transport.sent = lambda: sent()._replace(rows_bytes=sent().rows_bytes * 2)  # type: ignore[method-assign]
            return transport

    (cell,) = [cell for cell in conformance_cells(2) if cell.groups == ("traffic",)]
    for backend, wanted in ((Copies(), "failed"), (LoopbackBackend(), "passed")):
        for (result,) in ThreadRunner(2, backend)(run_cell, cell, backend.traits):
            assert result.status == wanted and ("once for each rank are" in result.message) == (wanted == "failed")
    once = dataclasses.replace(LoopbackBackend.traits, deduplicates=False)
    assert missing_trait(cell, once) == "deduplicates: it needs True"


@pytest.mark.parametrize("which", ["recorded", "latest", "latest of the layer"])
def test_a_backend_that_replays_another_layout_is_found_out(which: str):
    class Replays(LoopbackBackend):
        def open(self, spec: TransportSpec, link: Link) -> Transport:
            transport = super().open(spec, link)
            dispatch, rows_out, latest = transport.dispatch, transport.rows_out, {}

            def noted(*arguments: Any) -> Any:
                received = dispatch(*arguments)
                latest[""] = latest[arguments[-1].facts.layer] = received.layout
                return received

            def moved(x: torch.Tensor, layout: Any, call: Any) -> torch.Tensor:
                if call.facts.operation == "redispatch" and which != "recorded":
                    layout = latest["" if which == "latest" else call.facts.layer]
                return rows_out(x, layout, call)

            transport.dispatch, transport.rows_out = noted, moved  # type: ignore[assignment, method-assign]
            return transport

    (cell,) = [cell for cell in conformance_cells(2) if "checkpointing" in str(cell)]
    for (result,) in ThreadRunner(2, Replays())(run_cell, cell, Replays.traits):
        assert result.status == ("passed" if which == "recorded" else "failed"), result.detail


@pytest.mark.parametrize("place", [0, 2], ids=["x", "ids"])  # of scores a backend gets a copy
def test_inputs_that_are_written_to_are_found_out(place: int):
    class Writes(LoopbackBackend):
        def open(self, spec: TransportSpec, link: Link) -> Transport:
            transport = super().open(spec, link)
            dispatch = transport.dispatch

            def wrong(*arguments: Any) -> Any:
                received = dispatch(*arguments)
                arguments[place].index_fill_(0, torch.tensor([0]), 1)
                return received

            transport.dispatch = wrong  # type: ignore[assignment, method-assign]
            return transport

    workload = Workload(ep_size=2, routing="balanced", scores="inside")
    failed = {result.group for result in run(Writes(), workload) if result.status == "failed"}
    assert "inputs unchanged" in failed


def test_the_order_of_rows_counts_unless_the_trait_says_otherwise():
    unordered = dataclasses.replace(LoopbackBackend.traits, ordered_rows=False)
    workload = Workload(ep_size=2, routing="one hot expert", experts="identity")
    for traits, wanted in ((None, "failed"), (unordered, "passed")):
        results = run(Bent("dispatch: rows swapped", traits), workload)
        (on_last_rank,) = [result.status for result in results if result.group == "rows" and result.rank == 1]
        assert on_last_rank == wanted


class Modest(Backend):
    """A loopback that can do what vendors' libraries can, and fails where it is asked for more."""

    name = "modest"
    traits = dataclasses.replace(
        LoopbackBackend.traits,
        dtypes=frozenset({torch.bfloat16}),
        row_capacities=frozenset({"exact", "worst_case"}),
        reductions=frozenset({"fast"}),
        ordered_rows=False,
        duplicate_experts=False,
        max_top_k=4,
        hidden_multiple=128,
    )

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        assert (spec.dtype, spec.reduction, spec.hidden_dim % 128) == (torch.bfloat16, "fast", 0)
        assert spec.top_k <= 4 and spec.row_capacity.kind in self.traits.row_capacities
        transport = LoopbackBackend().open(spec, link)
        dispatch = transport.dispatch

        def distinct(x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, *rest: Any) -> Any:
            for named in ([id_ for id_ in of_token if id_ >= 0] for of_token in expert_ids.tolist()):
                assert len(set(named)) == len(named), f"a token names {named}"
            return dispatch(x, scores, expert_ids, *rest)

        transport.dispatch = distinct  # type: ignore[assignment, method-assign]
        return transport


def test_a_backend_that_can_do_little_is_tried_in_all_that_it_can():
    cells = conformance_cells(2, traits=Modest.traits)
    runner = ThreadRunner(2, Modest())
    quick = [cell for cell in cells if "inductor" not in str(cell) and "worst case: the same bits" not in str(cell)]
    quick = [cell for place, cell in enumerate(quick) if isinstance(cell.what, Scenario) or place % 2]
    by_cell = {cell: [r for rank in runner(run_cell, cell, Modest.traits) for r in rank] for cell in quick}
    results = [result for results in by_cell.values() for result in results]
    assert [(r.group, r.cell, r.message) for r in results if r.status == "failed"] == []
    passed = {result.group for result in results if result.status == "passed"}
    assert {group for cell in cells for group in cell.groups} - passed == {"same bits"}
    reasons = {result.message.partition(":")[0] for result in results if result.status == "skipped"}
    assert "hidden_multiple" not in reasons and "ordered_rows" in reasons
    ran = [cell.what for cell, of_cell in by_cell.items() if of_cell[0].status == "passed"]
    workloads = [what for what in ran if isinstance(what, Workload)]
    assert len(workloads) > 10
    assert {(what.hidden_dim, what.distinct_experts, what.ordered_rows) for what in workloads} == {(128, True, False)}


class OneSlot(Backend):
    """One that takes tokens of one slot, as for a router that names one expert."""

    name = "one slot"
    traits = dataclasses.replace(LoopbackBackend.traits, max_top_k=1)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        assert spec.top_k == 1
        return LoopbackBackend().open(spec, link)


def test_a_backend_of_one_slot_is_tried_in_everything():
    cells = conformance_cells(2, traits=OneSlot.traits)
    assert {missing_trait(cell, OneSlot.traits) for cell in cells} == {None}
    assert {cell.what.problem().config.top_k for cell in cells if isinstance(cell.what, Workload)} == {1}
    quick = {"ahead", "autograd", "calls", "capacity", "groups", "traffic"}
    runner = ThreadRunner(2, OneSlot())
    scenarios = [cell for cell in cells if isinstance(cell.what, Scenario) and cell.what.group in quick]
    results = [result for cell in scenarios for rank in runner(run_cell, cell, OneSlot.traits) for result in rank]
    assert [(r.cell, r.status, r.message) for r in results if r.status != "passed"] == []
    assert len(results) == 2 * len(scenarios) > 50
