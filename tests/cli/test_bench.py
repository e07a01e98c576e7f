"""`crossdock bench`: what it measures, what it says and writes, and how it ends."""

from __future__ import annotations

import json
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from crossdock.cli.bench.report import INTERPRETED, summary_of
from crossdock.cli.bench.run import Finished
from tests.cli.commands import crossdock, finished, typed

SWEPT = ["--repeats", "2", "--runs", "2", "--hidden", "64", "--experts", "8", "--top-k", "2"]
QUICK = [*SWEPT, "--tokens", "8"]


def test_a_sweep_with_all_its_files(tmp_path: Path):
    record, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    done = crossdock(
        "bench", "--device", "cpu", "--backend", "all_to_all", *SWEPT, "--sweep", "4,16", "--exact", "--bars",
        "--json", str(record), "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 cpu ranks; ceilings: put " in done.stdout
    assert "own-16: 16 tokens a rank x 64 x 8 experts, top-2, bfloat16, uniform" in done.stdout
    assert "bars of symmetric, set for 4 NVLink GPUs" in done.stdout
    assert "16 figures, all checked before" in done.stdout
    said = done.stderr.splitlines()  # no terminal
    assert said[:3] == [
        "crossdock bench: who can serve own-4",
        "crossdock bench: who can serve own-16",
        "crossdock bench: ceilings of links and memory",
    ]
    assert said[3] == "crossdock bench: 1 of 4: own-4, uniform: all_to_all" and len(said) == 7
    written = json.loads(record.read_text())
    assert {"machine", "versions", "commit", "command", "ceilings", "failed", "refused"} <= written.keys()
    assert (written["ranks"], written["device"], written["effort"]) == (2, "cpu", {"repeats": 2, "runs": 2})
    assert written["ceilings"]["link"] == "copies through memory that the ranks share"
    figures = {(f["workload"]["num_tokens"], f["operation"], f["reduction"]): f for f in written["figures"]}
    assert len(figures) == 16
    pair = figures[4, "pair", "fast"]
    assert pair["mode"] == "eager" and pair["us"]["median"] > 0 and len(pair["run_medians_us"]) == 2
    assert figures[16, "combine", "exact"]["copies_bytes"] >= figures[16, "combine", "exact"]["once_bytes"] > 0
    assert all(bar["met"] is None for bar in written["bars"])
    header = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 800


@pytest.mark.full
def test_ranks_of_torchrun(tmp_path: Path):
    record = tmp_path / "bench.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "-m", "crossdock.cli",
    ]  # fmt: skip
    arguments = ["bench", "--backend", "all_to_all", "--device", "cpu", *QUICK, "--json", str(record)]
    done = finished(*command, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("figures, all checked before") == 1
    assert json.loads(record.read_text())["ranks"] == 2


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need triton")
def test_figures_that_mean_nothing_are_left_out(tmp_path: Path):
    """How far one run's medians lie apart, and all that a GPU alone has: graphs, a host beside it, a floor."""
    record, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    done = crossdock(
        "bench", "--device", "cpu", "--backend", "symmetric", "--backend", "all_to_all", "--repeats", "1", "--runs",
        "1", "--tokens", "4", "--hidden", "16", "--experts", "4", "--top-k", "1", "--json", str(record), "--plot",
        str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert INTERPRETED in done.stdout
    (titles,) = (line.split() for line in done.stdout.splitlines() if "GB/s  " in line)
    assert " ".join(titles) == "us 10 to 90 % MB once / copies GB/s kept MB peak MB"
    assert "floor" not in done.stdout and "host us" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if re.match(" +(symmetric|all_to_all), ", line)]
    assert len(lines) == 12
    figures = {(f["backend"], f["operation"]): f for f in json.loads(record.read_text())["figures"]}
    assert len(figures) == 12
    for (backend, _), figure in figures.items():
        assert figure["noise_pct"] is None
        assert (figure["pct_of_floor"] is None) == (backend == "symmetric")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_last_line_says_what_was_checked():
    found = Finished(ceilings=cast(Any, None), seconds=2.4)
    assert summary_of(found) == "nothing was measured, in 2 s"
    found.failed.update(first="it broke", second="it broke")
    assert summary_of(found) == "nothing was measured, 2 failed, in 2 s"
    found.figures.append(cast(Any, None))
    assert summary_of(found) == "1 figure, all checked before, 2 failed, in 2 s"


def test_one_rank_alone():
    done = crossdock("bench", "--ranks", "1", "--device", "cpu", "--backend", "local", *QUICK)
    assert done.exit_code == 0, done.output
    assert "1 cpu rank; ceilings: copy " in done.stdout
    assert "local, " in done.stdout


CROOKED = """
import torch
from crossdock.backends.all_to_all import AllToAllBackend

class Crooked(AllToAllBackend):
    name = "crooked"

    def open(self, spec, link):
        transport = super().open(spec, link)
        right = transport.rows_home
        transport.rows_home = lambda *arguments: right(*arguments) * 2
        return transport
"""


def test_a_wrong_backend_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metadata = tmp_path / "crooked-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "crooked.py").write_text(CROOKED)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: crooked\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[crossdock.backends]\ncrooked = crooked:Crooked\n")
    monkeypatch.syspath_prepend(tmp_path)  # the ranks that are started have it too
    done = crossdock("bench", "--device", "cpu", "--backend", "crooked", *QUICK)
    assert done.exit_code == 1
    assert "is wrong and was not timed: on rank 0: output of combine, set 0: 512 of 512 elements differ" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


WRONG = {
    "--ranks must be at least 1, got 0": ["--ranks", "0"],
    "--device must be auto, cpu or cuda, got 'tpu'": ["--device", "tpu"],
    "--workload must be one of prefill, train": ["--workload", "typo"],
    "--routing must be one of uniform, zipf, one-hot-rank, got 'x'": ["--routing", "x"],
    "--capacity must be exact, worst_case, balanced:FACTOR, rows or rows:N, got 'some'": ["--capacity", "some"],
    "--dtype must be one of bfloat16, float16, float32, got 'int8'": ["--dtype", "int8"],
    "--sweep must be 'auto' or numbers of tokens such as 16,128,1024, got '1,x'": ["--sweep", "1,x"],
    "--top-k (9) must not exceed --experts (8)": ["--experts", "8", "--top-k", "9"],
    "the 7 experts of own do not divide over 2 ranks": ["--experts", "7", "--top-k", "1"],
    "--tokens must be at least 1, got 0": ["--tokens", "0"],
    "--sweep 16 and --tokens 8 both say how many tokens there are": ["--sweep", "16", "--tokens", "8"],
    "--json / is a folder, it must be a file": ["--json", "/"],
    "--plot /tmp/b.jpg must end in .png": ["--plot", "/tmp/b.jpg"],
    "--repeats must be at least 1, got 0": ["--repeats", "0"],
    "--num-sms must be at least 1, got 0": ["--num-sms", "0"],
    "--num-sms must be at least 1, got -4": ["--num-sms", "-4", "--tokens", "8"],
    "hidden_dim must be at most 2147483647, got 3000000000": ["--hidden", "3000000000"],
    "unknown backend 'typo'; known are 'local', 'loopback', 'all_to_all'": ["--backend", "typo"],
    "own sizes and a sweep start from one --workload, got several": [
        "--workload", "cpu", "--workload", "cpu-decode", "--tokens", "4",
    ],
    "--json /no/such/folder/x.json is in a folder that does not exist": ["--json", "/no/such/folder/x.json"],
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_values(sentence: str):
    done = crossdock("bench", *(["--device", "cpu"] if "--device" not in WRONG[sentence] else []), *WRONG[sentence])
    assert (done.exit_code, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("crossdock bench: ") and sentence in said


def test_a_wrong_value_is_one_sentence_to_who_types_it():
    done = typed("bench", "--device", "cpu", "--ranks", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "crossdock bench: --ranks must be at least 1, got 0\n"


def test_values_that_turn_out_wrong_on_the_ranks():
    refused = crossdock("bench", "--device", "cpu", "--backend", "loopback", *QUICK)
    assert refused.exit_code == 2
    assert "no backend can serve any workload here: loopback: " in refused.stderr
