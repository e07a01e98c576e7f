"""The benchmark's own arithmetic, a comparison of real ranks, and the tables on the page of measurements."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from crossdock.bench import Crossdock, Measurement, Record, Spread, Workload, compare, describe_machine
from crossdock.bench.checks import check_to_the_bit, check_within_baseline
from crossdock.bench.memory import peak_growth_bytes
from crossdock.bench.tables import as_markdown
from crossdock.bench.timing import ratio, skew_pct, slowest_rank, time_in_turns
from crossdock.bench.workloads import Moved

ROOT = Path(__file__).parents[2]
SMALL = Workload(num_tokens=12, hidden_dim=16, num_experts=4, top_k=2, dtype=torch.bfloat16)


def test_the_slowest_rank_counts_round_by_round():
    by_rank = [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]
    assert slowest_rank(by_rank) == [2.0, 5.0, 3.0]
    assert skew_pct(by_rank) == pytest.approx(0.0)
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]).median == 2.0


def test_every_step_has_a_turn_and_none_is_always_first():
    ran: list[str] = []
    steps = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = time_in_turns(steps, rounds=3, warmup=0, meet=lambda: None)
    assert "".join(ran) == "abcbcacab"
    assert {name: len(of_step) for name, of_step in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_inputs_are_the_same_wherever_they_are_made():
    for once, again in zip(SMALL.inputs(1), SMALL.inputs(1), strict=True):
        assert torch.equal(once, again)
    assert not torch.equal(SMALL.inputs(0).x, SMALL.inputs(1).x)


def test_ranks_are_compared_and_the_record_can_be_read_again(tmp_path: Path):
    comparison = compare(
        SMALL, (Crossdock("all_to_all", "exact"), Crossdock("all_to_all", "fast")), num_ranks=2, rounds=3
    )
    exact, fast = comparison.measurements
    assert exact.times_as_fast is None and fast.times_as_fast is not None
    assert 0 < fast.sent_bytes_per_rank <= exact.sent_bytes_per_rank
    record = Record(machine=describe_machine(threads_per_rank=1), comparisons=(comparison,))
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    assert "crossdock all_to_all, fast" in as_markdown(comparison)


def test_wrong_results_are_not_timed():
    moved = [Moved(torch.zeros(12, 16, dtype=torch.bfloat16), *(torch.zeros(0),) * 2)] * 2
    with pytest.raises(AssertionError, match="output of rank 0"):
        check_to_the_bit(SMALL, "exact", moved)
    with pytest.raises(AssertionError, match="out of rank 0"):
        check_within_baseline(SMALL, moved)


def test_peak_memory_is_what_was_touched():
    peak = peak_growth_bytes(lambda: torch.ones(8 << 20))
    if peak is None:
        pytest.skip("no /proc on this system")
    assert peak > 16 << 20


def test_a_spread_shows_its_ends():
    measurement = Measurement(name="x", slowest_rank_ms=Spread(2.0, 1.0, 3.0), skew_pct=0.0, sent_bytes_per_rank=1)
    assert f"{measurement.slowest_rank_ms:.1f}" == "2.0 (1.0 to 3.0)"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_means_nothing_is_left_out_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    workload = {"name": "own", "num_tokens": 4, "hidden_dim": 16, "num_experts": 4, "routing": "uniform"}
    figure = {
        "workload": workload, "backend": "symmetric", "capacity": "exact()", "num_sms": None, "operation": "dispatch",
        "mode": "eager", "us": {"median": 12.34}, "pct_of_floor": None, "host_us": None, "host_grad_us": None,
    }  # fmt: skip
    record = {
        "command": "crossdock bench", "machine": {"gpus": [], "processor": "x86_64"}, "versions": {"torch": "2.13.0"},
        "ceilings": {"put_gb_per_s": None, "get_gb_per_s": None, "copy_gb_per_s": 7.6, "collective_gb_per_s": None},
        "figures": [figure],
    }  # fmt: skip
    (tmp_path / "alone.json").write_text(json.dumps(record))
    module = program("write_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    lines = module.bench_of("alone").splitlines()
    assert lines[0] == "`crossdock bench` on x86_64; torch 2.13.0. Ceilings, GB/s: copy 8."
    assert "| auto | dispatch | 12.3 |  |  |  |  |  |" in lines


def test_the_record_is_written_over_only_when_asked():
    parsed, results = program("cpu_against_transformers").parsed, ROOT / "benchmarks" / "results"
    assert parsed([]).json.parent == ROOT / "bench" and "/bench/" in (ROOT / ".gitignore").read_text().split()
    assert parsed(["--record"]).json.parent == results and parsed(["--record"]).json.exists()


def test_tables_on_the_page_are_those_of_the_results():
    page = (ROOT / "docs" / "measurements.md").read_text()
    assert program("write_tables").with_tables(page) == page, "run benchmarks/write_tables.py"
