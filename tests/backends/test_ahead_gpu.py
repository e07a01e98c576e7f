"""The host runs ahead of two GPUs, and a second stream beside it: the scenarios of that name, on real streams."""

from __future__ import annotations

from typing import Any

import pytest

from crossdock.testing import Cell, run_cell, run_ranks, seat_of_process, traits_of
from crossdock.testing.scenarios.ahead import SCENARIOS
from tests.gpus import on_gpus

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]


def _run_all(rank: int, backend: str) -> list[tuple[str, str]]:
    """How each scenario ended, in words."""
    seat, traits = seat_of_process(backend), traits_of(backend)
    results: list[Any] = [result for what in SCENARIOS for result in run_cell(seat, Cell(what), traits)]
    return [(f"{result.status} {result.message}".strip(), result.cell) for result in results]


@pytest.mark.parametrize(("backend", "num_run"), [("symmetric", len(SCENARIOS)), ("all_to_all", len(SCENARIOS) // 2)])
def test_nothing_is_read_too_late_or_written_too_early(backend: str, num_run: int):
    for ended in run_ranks(_run_all, 2, backend, **on_gpus(2), timeout_s=200.0):
        assert [cell for word, cell in ended if not word.startswith(("passed", "skipped sync_free_devices"))] == [], (
            ended
        )
        assert sum(word == "passed" for word, _ in ended) == num_run
