"""`crossdock bench train-step`: both ways train to the same bits, and wrong values are refused in a sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from crossdock import RowCapacity
from crossdock.bench.timing import Spread
from crossdock.bench.train_step import StepRun, cases_of, run_case
from crossdock.bench.train_step_model import SIZES
from crossdock.cli.bench.plan import Place
from crossdock.cli.bench.train_step import _OPTIONS
from crossdock.cli.bench.train_step_report import Measured, Pair, remarks_of, table_of, title_of
from tests.cli.commands import crossdock, typed
from tests.conftest import Ranks

SIZES_HERE = dataclasses.replace(SIZES["cpu"], num_layers=1, num_tokens=13, hidden_dim=16, ffn_dim=16)
QUICK = ["--device", "cpu", "--layers", "1", "--tokens", "16", "--hidden", "16", "--ffn", "16", "--steps", "2"]


def test_both_routings_with_a_record(tmp_path: Path):
    record = tmp_path / "step.json"
    done = crossdock("bench", "train-step", *QUICK, "--json", str(record))
    assert done.exit_code == 0, done.output
    assert done.stdout.count("losses of all steps: the same bits") == 2
    assert "host reads of counts a step" in done.stdout
    # Gloo takes its sizes from the host, which the table must not hide.
    assert (
        " ".join(done.stdout.split()).count("takes its sizes from the host here: with fixed rows it reads counts") == 2
    )
    assert "sync-free" not in done.stdout
    assert "--factor" not in done.stderr
    assert done.stderr.startswith("crossdock bench train-step: 1 of 8: dynamic routing, row_capacity exact()\n")
    written = json.loads(record.read_text())
    assert {"machine", "versions", "commit", "command", "sizes", "seconds"} <= written.keys()
    assert (written["ranks"], written["device"], written["sizes"]["num_tokens"]) == (2, "cpu", 16)
    dynamic, static = written["pairs"]
    assert [pair["sync_free"]["row_capacity"] for pair in (dynamic, static)] == ["calibrated(1.5)", "rows(32)"]
    for pair in (dynamic, static):
        assert pair["same_bits"] and pair["waiting"]["row_capacity"] == "exact()"
        for way in (pair["waiting"], pair["sync_free"]):
            assert len(way["runs"]) == 2 and way["step_ms"] > 0 and way["dispatch_host_us"] > 0
            assert all(len(run["losses"]) == 2 * (3 + 2) for run in way["runs"])
            assert way["device_idle_pct"] is None


def test_rows_that_do_not_fit_are_one_sentence():
    done = crossdock("bench", "train-step", *QUICK, "--routing", "dynamic", "--runs", "1", "--factor", "0.1")
    assert (done.exit_code, done.stdout) == (1, "")
    said = [line for line in done.stderr.splitlines() if not re.match(r"crossdock bench train-step: \d of \d: ", line)]
    assert len(said) == 1 and re.search("row_capacity calibrated.* raise its factor to at least ", said[0])


def test_a_factor_is_not_for_static_routing():
    said = "crossdock bench train-step: --factor 7 does not apply to static routing, whose number of rows is known"
    for routings, lines in ((["dynamic"], 0), (["dynamic", "static"], 1)):
        asked = [word for routing in routings for word in ("--routing", routing)]
        done = crossdock("bench", "train-step", *QUICK, "--runs", "1", *asked, "--factor", "7")
        assert done.exit_code == 0, done.output
        assert done.stderr.count(said) == lines
        assert "calibrated(7.0)" in done.stdout


def test_a_table_tells_what_still_waits():
    sizes, place = dataclasses.replace(SIZES_HERE, dtype="float32"), Place("cuda", 2, False)
    run = StepRun(
        step_ms=Spread(4.0, 3.0, 5.0), tokens_per_s=1.0, dispatch_host_us=Spread(9.0, 8.0, 10.0),
        host_reads_per_step=0.0, device_busy_ms=3.0, rows_per_layer=8, bytes_per_layer=64, losses=(1, 2),
    )  # fmt: skip
    pair = Pair(*(Measured(case, (run,)) for case in cases_of(sizes, "dynamic", "symmetric", 1.5, 2)))
    assert [table_of(pair, experts_wait=waits).columns[2].header for waits in (False, True)] == [
        "sync-free",
        "fixed rows",
    ]
    same = "losses of all steps: the same bits"
    waits = "experts of float32 in these widths read counts on the host here: both columns wait"
    assert [remarks_of(pair, experts_wait=waits) for waits in (False, True)] == [[same], [same, waits]]
    assert title_of(sizes, place, pair).startswith(
        "dynamic routing, symmetric, 2 cuda ranks: 1 layer of 16 x 8 experts"
    )
    assert "device idle" in list(table_of(pair, experts_wait=False).columns[0].cells)


def test_a_gain_that_noise_could_be_is_none():
    def way(*medians_ms: float) -> Measured:
        runs = (
            StepRun(
                step_ms=Spread(ms, ms, ms), tokens_per_s=1e3 / ms, dispatch_host_us=Spread(9.0, 9.0, 9.0),
                host_reads_per_step=0.0, device_busy_ms=None, rows_per_layer=8, bytes_per_layer=64, losses=(1, 2),
            )
            for ms in medians_ms
        )  # fmt: skip
        return Measured(cases_of(SIZES_HERE, "dynamic", "symmetric", 1.5, 2)[0], tuple(runs))

    assert Pair(way(40.0, 56.4), way(52.0, 67.0)).gain("step_ms") is None  # 41 % apart, and 23 % between the ways
    assert Pair(way(6.0), way(4.0)).gain("step_ms") == 1.5  # one run: nothing is known of noise
    clear = Pair(way(6.0, 6.3), way(4.0, 4.2))
    assert clear.gain("step_ms") == pytest.approx(1.5) and clear.gain("dispatch_host_us") is None
    table = table_of(clear, experts_wait=False)
    assert list(table.columns[3].cells) == ["", "1.50 x", "within noise", "+50.0 %", "", ""]
    assert "device idle" not in list(table.columns[0].cells)  # nothing is known of it on a CPU


def test_help_tells_the_defaults():
    told = crossdock("bench", "train-step", "--help", COLUMNS="200").stdout.splitlines()
    for name, option in _OPTIONS.items() | {("dtype", "--dtype")}:
        gpu, cpu = (getattr(SIZES[device], name) for device in ("cuda", "cpu"))
        default = f" Default: {gpu}." if gpu == cpu else f" Default: {gpu}, on a CPU {cpu}."
        assert any(f" {option} " in line and default in line for line in told), option
    assert any("number of tokens, which is declared." in line for line in told)  # lines are filled


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_rows_of_static_routing_are_known(ranks: Ranks, num_ranks: int):
    waiting, free = cases_of(SIZES_HERE, "static", "all_to_all", 1.5, num_ranks)
    runs = [ranks(num_ranks).run(run_case, case, 1)[0] for case in (waiting, free)]
    assert free.row_capacity == RowCapacity.rows(runs[0].rows_per_layer)
    assert runs[0].losses == runs[1].losses
    assert runs[1].bytes_per_layer == runs[1].rows_per_layer * 16 * 4


def test_ways_whose_losses_differ_are_told():
    run = StepRun(
        step_ms=Spread(4.0, 3.0, 5.0), tokens_per_s=1.0, dispatch_host_us=Spread(9.0, 8.0, 10.0),
        host_reads_per_step=1.0, device_busy_ms=3.0, rows_per_layer=8, bytes_per_layer=64, losses=(1, 2),
    )  # fmt: skip
    assert run.device_idle_pct == 25.0
    waiting, free = cases_of(SIZES_HERE, "dynamic", "all_to_all", 1.5, 2)
    other = dataclasses.replace(run, losses=(1, 3), step_ms=Spread(5.0, 5.0, 5.0))
    assert Pair(Measured(waiting, (run,)), Measured(free, (run,))).same_bits
    assert not Pair(Measured(waiting, (run,)), Measured(free, (run, other))).same_bits
    both = Measured(free, (run, other))
    assert (both.middle("step_ms"), both.noise_pct("step_ms"), both.idle_pct) == (4.5, 25.0, 32.5)
    assert Measured(free, (run,)).noise_pct("step_ms") is None  # nothing to compare it with


WRONG = {
    "--factor must be above 0, got -1": ["--factor", "-1"],
    "--routing must be dynamic or static, got both": ["--routing", "both"],
    "--steps must be at least 1, got 0": ["--steps", "0"],
    "--tokens must be at least 1, got 0": ["--tokens", "0"],
    "--top-k (9) must not exceed --experts (8)": ["--top-k", "9"],
    "7 experts do not divide over 2 ranks": ["--experts", "7"],
    "--dtype must be one of bfloat16, float16, float32, got 'int8'": ["--dtype", "int8"],
    "unknown backend 'typo'": ["--backend", "typo"],
    "backend 'local' is not available here: it serves one rank, and this group has 2": ["--backend", "local"],
    "--json /no/such/folder/x.json is in a folder that does not exist": ["--json", "/no/such/folder/x.json"],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_values(sentence: str):
    done = crossdock("bench", "train-step", "--device", "cpu", *WRONG[sentence])
    assert (done.exit_code, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("crossdock bench train-step: ") and sentence in said


def test_a_wrong_value_is_one_sentence_to_who_types_it():
    done = typed("bench", "train-step", "--device", "cpu", "--steps", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "crossdock bench train-step: --steps must be at least 1, got 0\n"
