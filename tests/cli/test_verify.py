"""`crossdock verify`: what it runs, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from crossdock.cli.verify.plan import Plan, make_plan
from crossdock.cli.verify.progress import in_lines
from crossdock.errors import ConfigError
from crossdock.testing import CellResult
from crossdock.testing.conformance import Status
from tests.cli.commands import crossdock, finished, typed


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("loopback", 2), ("all_to_all", 2)])
def test_a_part_of_the_suite(backend: str, ranks: int, tmp_path: Path):
    where = f"{ranks} cpu rank{'s' * (ranks > 1)}"
    record = tmp_path / "verify.json"
    arguments = ("--backend", backend, "--ranks", str(ranks), "--only", "skewed", "--json", str(record))
    done = crossdock(
        "verify", *arguments, COLUMNS="60"
    )  # of the table; sentences stay whole where there is no terminal
    assert done.exit_code == 0, done.output
    assert f"{backend} on {where} conforms as far as --only goes: 20 checks passed, 0 skipped, 0 failed" in done.stdout
    assert "gradients" in done.stdout
    written = json.loads(record.read_text())
    assert (written["backend"], written["ranks"], written["all_passed"]) == (backend, ranks, True)
    assert written["only"] == "skewed"
    assert {"machine", "versions", "commit", "command", "seconds"} <= written.keys()
    assert len(written["cells"]) == 20
    assert {cell["status"] for cell in written["cells"]} == {"passed"}


def test_ranks_of_torchrun(tmp_path: Path):
    record = tmp_path / "verify.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
        "crossdock.cli",
    ]
    arguments = ["verify", "--only", "one hot expert", "--json", str(record)]
    done = finished(*command, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("conforms") == 1
    assert json.loads(record.read_text())["ranks"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_has_a_bar_and_no_lines():
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "crossdock.cli", "verify", "--backend", "local", "--only", "skewed"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as running:
        os.close(theirs)
        said = b"".join(parts(ours)).decode()
    os.close(ours)
    assert running.returncode == 0 and "━" in said and "crossdock verify: " not in said


def parts(terminal: int) -> Iterator[bytes]:
    with suppress(OSError):  # how Linux says that nobody has the other end any more
        while part := os.read(terminal, 4096):
            yield part


def test_a_pipe_is_told_at_once_that_something_is_done():
    command = [sys.executable, "-m", "crossdock.cli", "verify", "--only", "skewed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        first = running.stderr.readline()
        assert running.poll() is None, "it comes before the table"
        table, rest = running.communicate(timeout=110)
    assert running.returncode == 0 and all(line.startswith("crossdock verify: ") for line in rest.splitlines()), rest
    assert re.fullmatch(r"crossdock verify: \d+ cells on 2 cpu ranks\n", first)
    assert "conforms" in table and "verify:" not in table


def test_a_whole_part_of_the_description_is_meant_before_any_text():
    def cells(only: str) -> set[str]:
        return {str(cell) for cell in make_plan("loopback", 2, "cpu", False, 1, False, only, None).cells}

    half = cells("float16")
    assert half and all(", float16, " in cell for cell in half)
    assert cells("float16, ") == half and cells("bfloat16").isdisjoint(half)
    assert cells("oat16") == half | cells("bfloat16")  # no part, but text of some


def test_lines_say_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    plan = make_plan("loopback", 2, "cpu", False, 1, False, "skewed", None)
    done: list[list[CellResult]] = []
    for cell in in_lines(plan, done, every_s=0.0):
        statuses: tuple[Status, ...] = ("passed", "skipped", "passed" if len(done) < 2 else "failed")
        done.append([CellResult(group="rows", cell=str(cell), rank=0, status=status) for status in statuses])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "crossdock verify: 5 cells on 2 cpu ranks"
    assert said[2] == "crossdock verify: 2 of 5 cells, 4 checks passed, 0 failed, 0 s"
    assert said[5] == "crossdock verify: 5 of 5 cells, 7 checks passed, 3 failed, 0 s"
    assert len(list(in_lines(plan, done, every_s=60.0))) == len(plan.cells)
    assert len(capsys.readouterr().err.splitlines()) == 1


BENT = """
import torch
from crossdock.backends.base import Backend, BackendTraits
from crossdock.backends.all_to_all import AllToAllBackend

class Bent(AllToAllBackend):
    name = "bent"
    traits = BackendTraits(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))

    def open(self, spec, link):
        transport = super().open(spec, link)
        right = transport.rows_home
        transport.rows_home = lambda *arguments: right(*arguments) * 2
        return transport
"""


def install_bent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A package with a backend named "bent"; the ranks that are started have it too."""
    (tmp_path / "bent.py").write_text(source)
    facts = tmp_path / "bent-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: bent\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[crossdock.backends]\nbent = bent:Bent\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_backend_of_a_package_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_bent(tmp_path, monkeypatch, BENT)
    record = tmp_path / "verify.json"
    done = crossdock("verify", "--backend", "bent", "--only", "skewed", "--json", str(record), COLUMNS="200")
    assert done.exit_code == 1, done.output
    assert "bent on 2 cpu ranks does NOT conform" in done.stdout
    assert "output of combine" in done.stdout
    cells = json.loads(record.read_text())["cells"]
    assert {cell["status"] for cell in cells if cell["group"] == "output"} == {"failed", "skipped"}
    reasons = {cell["message"].partition(": ")[0] for cell in cells if cell["status"] == "skipped"}
    assert reasons <= {"dtypes", "row_capacities"}
    assert {cell["status"] for cell in cells if cell["group"] == "rows"} == {"passed", "skipped"}
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("│ rows "))
    reasons_of_rows = [cell["message"] for cell in cells if cell["group"] == "rows" and cell["status"] == "skipped"]
    lacking = [reason for reason in reasons_of_rows if reason.startswith("row_capacities: ")]
    assert re.search(rf"row_capacities: [a-z_, ]+ \({len(lacking)} cells?\)", done.stdout), row
    assert done.stdout.count("row_capacities: ") == 3  # in a line each of the groups that failed nowhere


REFUSING = BENT.replace(
    "    def open(",
    """    def refusal(self, spec, group):
        return f"it serves one rank, and this group has {group.size}" if group.size > 1 else None

    def open(""",
)


def test_a_backend_that_refuses_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_bent(tmp_path, monkeypatch, REFUSING)
    done = crossdock("verify", "--backend", "bent", "--only", "skewed", "--jobs", "2")
    assert (done.exit_code, done.stdout) == (2, "")
    sentence = "backend 'bent' is not available here: it serves one rank, and this group has 2"
    assert done.stderr == f"crossdock verify: {sentence}\n"
    assert crossdock("verify", "--backend", "bent", "--only", "skewed", "--ranks", "1").exit_code == 1


@pytest.fixture
def sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, and two backends of another package: of one the ranks may share it."""
    classes = "from bent import Bent\nclass Alone(Bent): name = 'alone'\nclass Shared(Bent): name = 'shared'\n"
    traits = "BackendTraits(devices=frozenset({'cuda'}), dtypes=frozenset(), ranks_share_gpus=True)"
    (tmp_path / "bent.py").write_text(BENT)
    (tmp_path / "two.py").write_text(
        f"from crossdock.backends.base import BackendTraits\n{classes}Shared.traits = {traits}\n"
    )
    facts = tmp_path / "two-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: two\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[crossdock.backends]\nalone = two:Alone\nshared = two:Shared\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize(
    ("backend", "may"),
    [("symmetric", True), ("loopback", True), ("shared", True), ("alone", False), ("all_to_all", False)],
)
def test_ranks_share_a_gpu_where_the_backend_s_traits_say_so(backend: str, may: bool):
    def plan(share_gpus: bool = True, ranks: int = 4) -> Plan:
        return make_plan(backend, ranks, "cuda", share_gpus, 1, False, None, None)

    if not may:
        with pytest.raises(ConfigError, match=rf"ranks_share_gpus; got --device cuda and --backend {backend}$"):
            plan()
        return
    made = plan()
    assert (made.device_type, made.share_gpus) == ("cuda", backend != "loopback")  # threads have one device anyway
    assert made.in_threads or made.group_backend == "gloo"
    assert plan(ranks=1).group_backend == "nccl"  # it has the GPU for itself
    if not made.in_threads:
        with pytest.raises(ConfigError, match="--device cuda needs 4 CUDA devices on this host, torch sees 1"):
            plan(share_gpus=False)


WRONG = {
    "unknown backend 'typo'; known are 'local', 'loopback', 'all_to_all'": ["--backend", "typo"],
    "backend 'local' serves one rank, got --ranks 2": ["--backend", "local", "--ranks", "2"],
    "--ranks must be at least 1, got 0": ["--ranks", "0"],
    "--jobs must be at least 1, and 1 under torchrun, got 0": ["--jobs", "0"],
    "got --device cpu and --backend symmetric": ["--backend", "symmetric", "--device", "cpu", "--share-gpus"],
    "got --device cuda and --backend all_to_all": ["--backend", "all_to_all", "--device", "cuda", "--share-gpus"],
    "--device must be auto, cpu or cuda, got 'tpu'": ["--device", "tpu"],
    "--only 'nothing of the kind' is in no cell's description": ["--only", "nothing of the kind"],
    "--json /no/such/folder/x.json is in a folder that does not exist": ["--json", "/no/such/folder/x.json"],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_values(sentence: str):
    done = crossdock("verify", *WRONG[sentence])
    assert (done.exit_code, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("crossdock verify: ") and sentence in said


def test_a_wrong_environment():
    sentence = "the environment variable WORLD_SIZE must be a number of ranks, got 'two'"
    done = typed("verify", RANK="0", WORLD_SIZE="two")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"crossdock verify: {sentence}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_record_that_cannot_be_written_costs_no_table():
    done = crossdock("verify", "--backend", "local", "--only", "one hot", "--json", "/dev/full")
    assert done.exit_code == 1 and "conforms" in done.stdout
    assert done.stderr.endswith("crossdock verify: --json /dev/full could not be written: No space left on device\n")
