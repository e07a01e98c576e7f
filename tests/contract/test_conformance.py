"""The conformance suite on every backend: the workload grid and the scenarios, a test for every cell."""

from __future__ import annotations

from typing import Any

import pytest

from crossdock.testing import Cell, conformance_cells, run_cell, traits_of
from crossdock.testing.scenario import Scenario
from tests.contract.conftest import BACKENDS, FURTHER, On

# Inductor compiles for long, and what it makes of a layout does not depend on the backend; aot_eager stays.
COMPILED_TO_CODE = {"torch.compile, inductor: the same bits", "torch.compile, worst case: the same bits"}
WITHOUT_CODE = ("symmetric", "loopback")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("--full"))
    cells = [
        (backend, ep_size, cell)
        for backend, sizes in BACKENDS.items()
        for ep_size in sizes
        if full or ep_size > 1 or len(sizes) == 1  # one rank alone: `local` stands for all, but in the whole grid
        for cell in conformance_cells(ep_size, full=full)
    ]
    cells += [
        (backend, ep_size, cell)
        for backend, sizes in FURTHER.items()
        for ep_size in sizes
        for cell in conformance_cells(ep_size)
        if cell.groups == ("groups",) and (full or (isinstance(cell.what, Scenario) and cell.what.min_ranks > 2))
    ]
    metafunc.parametrize(("backend", "ep_size", "cell"), [as_parameters(*each) for each in cells])


def as_parameters(backend: str, ep_size: int, cell: Cell) -> Any:
    marks = pytest.mark.full if backend in WITHOUT_CODE and str(cell) in COMPILED_TO_CODE else ()
    name = f"{backend}-{ep_size}-{cell}".replace(", ", "-").replace(" ", "_")
    return pytest.param(backend, ep_size, cell, id=name, marks=marks)


def test_cell(on: On, backend: str, ep_size: int, cell):
    results = [result for rank in on(backend, ep_size)(run_cell, cell, traits_of(backend)) for result in rank]
    failed = [result for result in results if result.status == "failed"]
    assert not failed, "\n".join(f"rank {f.rank}, {f.group}: {f.message}\n{f.detail}" for f in failed)
    if skipped := [result.message for result in results if result.status == "skipped"]:
        pytest.skip(skipped[0])
