"""`crossdock doctor`: what it finds, also of packages that are broken."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from crossdock.cli.failures import line_of
from crossdock.cli.reach import Facts, Reached, Refusal, findings_of, look_at_ranks
from crossdock.testing import RankResult, RanksFailed, run_ranks
from tests.cli.commands import crossdock


def test_installed_is_not_loadable(tmp_path: Path):
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem.so: undefined symbol')\n")
    (tmp_path / "uccl.py").write_text("import os; os._exit(9)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])  # of the processes that load one each
    done = crossdock("doctor", PYTHONPATH=path, COLUMNS="200")
    assert done.exit_code == 0, done.output
    rows = {cells[1]: cells[2:4] for line in done.stdout.splitlines() if len(cells := _cells(line)) > 3}
    assert rows["deep_ep"] == ["broken", "OSError: libnvshmem.so: undefined symbol (no adapter yet)"]
    assert rows["uccl"] == ["broken", "exit code 9 (no adapter yet)"]
    assert rows["hybrid_ep_cpp"] == ["absent", "not installed (no adapter yet)"]
    assert rows["Gloo"] == ["ok", "built in"] and rows["torch"][0] == "ok"
    assert {"python", "NCCL", "triton"} <= rows.keys()
    for package, line in (("safetensors", "pip install safetensors"), ("transformers", "'transformers>=5.24'")):
        assert (rows[package][0] == "absent") == (line in rows[package][1])
    assert "local       chosen" in done.stdout


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


SHUT = """
from crossdock.backends.all_to_all import AllToAllBackend
from crossdock.errors import BackendUnavailable

class Shut(AllToAllBackend):
    name = "{name}"

    def open(self, spec, link):
        raise {error}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **errors: str) -> None:
    """Backends of other packages that raise errors where they are opened; the ranks that are started have them too."""
    for name, error in errors.items():
        (folder / f"{name}.py").write_text(SHUT.format(name=name, error=error))
        facts = folder / f"{name}-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[crossdock.backends]\n{name} = {name}:Shut\n")
    monkeypatch.syspath_prepend(folder)


def by_name(reached: Reached | None) -> dict[str, tuple[str, str]]:
    """Status and detail of what ranks have found out of each other."""
    assert reached is not None and reached.reports and {each.area for each in reached.findings} == {"ranks"}
    return {each.name: (each.status, each.detail) for each in reached.findings}


def test_two_ranks_reach_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shut = "BackendUnavailable('shut', 'its cable is out', 'plug it in')"
    install(tmp_path, monkeypatch, shut=shut, strange="KeyError('no such port')")
    reached = look_at_ranks(2)
    found = by_name(reached)
    assert found["one host"] == ("ok", f"ranks [0, 1] on {socket.gethostname()}")
    assert found["store"][0] == "ok"
    assert found["all_to_all"] == ("ok", "opened on 2 ranks, 0 MiB of storage a rank")
    assert found["local"] == ("absent", "on rank 0: it serves one rank, and this group has 2")
    assert found["shut"][0] == "broken"
    assert found["shut"][1].endswith("backend 'shut' is not available here: its cable is out; plug it in")
    assert found["strange"][0] == "broken"
    assert re.fullmatch(r"on rank [01]: KeyError: 'no such port'", found["strange"][1])  # of who is the first to know
    assert found["auto"] == ("ok", "takes all_to_all on these ranks")
    assert reached is not None
    choice = reached.choice
    assert (choice["sample"], choice["chosen"]) == (
        "2 ranks, 16 experts, top 8, hidden_dim 2048, bfloat16",
        "all_to_all",
    )
    assert choice["candidates"]["all_to_all"] is None and "auto" not in choice["candidates"]
    assert choice["candidates"]["local"] == found["local"][1]
    assert "peer access" not in found  # there are no GPUs
    if find_spec("triton") is not None:  # (1 + 2) * 4096 rows of 4 KiB are 48 MiB, and there is more than rows
        status, detail = found["symmetric"]
        assert status == "ok" and 48 <= int(detail.split()[4]) < 60, detail


def test_ranks_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch, shut="SystemExit('no such port')")
    reached = look_at_ranks(2)
    ((name, (status, detail)),) = by_name(reached).items()
    assert (name, status) == ("all", "broken")
    assert reached is not None and reached.choice["chosen"] is None and reached.choice["candidates"] == {}
    # Which of them are through before the first has ended the others is a matter of luck.
    assert re.fullmatch(r"failed on rank (0|1|0, 1) of 2: SystemExit: no such port", detail)


def test_ranks_that_failed_come_to_one_line():
    silent = RankResult(rank=0, silent=True, stacks="Current thread:\n  File x, line 1 in <module>\n")
    died, waited = RankResult(rank=1, exit_code=1), RankResult(rank=2, error_type="PeerTimeout", message="no rank 1")
    raised = RankResult(rank=3, error_type="SystemExit", message="no such port\nanywhere")
    assert line_of(RanksFailed([silent])) == "failed on rank 0 of 1: rank 0 has not answered"
    assert line_of(RanksFailed([silent, died])) == "failed on rank 0, 1 of 2: rank 1 died: exit code 1"
    assert line_of(RanksFailed([silent, died, waited])) == "failed on rank 0, 1, 2 of 3: PeerTimeout: no rank 1"
    assert line_of(RanksFailed([silent, died, waited, raised])).endswith("of 4: SystemExit: no such port")


def test_a_refusal_is_told_where_it_comes_from():
    """Of the first rank that has one of its own: another one has just waited for that."""
    echo, own = Refusal(True, True, "rank 1 did not come"), Refusal(False, True, "the cable is out")
    first = Refusal(False, False, "zzz")
    for refusals, told in (
        ((echo, own, None), ("broken", "on rank 1: the cable is out")),
        ((echo, first, own), ("absent", "on rank 1: zzz")),
        ((None, echo, None), ("broken", "on rank 1: rank 1 did not come")),
    ):
        facts = [Facts("here", "cpu", 1.0, [], {"mine": refusal}, {}) for refusal in refusals]
        (found,) = [finding for finding in findings_of(facts) if finding.name == "mine"]
        assert (found.status, found.detail) == told


def as_by_torchrun(rank: int, port: int) -> str:
    """What a rank says that has the variables which torchrun sets."""
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = {name: str(value) for name, value in of_torchrun.items()}
    done = crossdock("doctor", "--json", MASTER_ADDR="127.0.0.1", **environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_ranks_of_torchrun_report_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = run_ranks(as_by_torchrun, 2, port, backend=None)
    assert second == ""
    record: dict[str, Any] = json.loads(first)
    assert {"machine", "versions", "commit", "command"} <= record.keys()
    assert (record["backends"]["chosen"], record["backends"]["sample"].split(",")[0]) == ("all_to_all", "2 ranks")
    findings = {(each["area"], each["name"]): each["status"] for each in record["findings"]}
    assert findings["ranks", "all_to_all"] == findings["communication", "Gloo"] == "ok"


WRONG = {
    "--ranks must be at least 2, got 1: leave it out for one rank": (["--ranks", "1"], {}),
    "--ranks 3 differs from torchrun's 2 ranks: leave --ranks out": (
        ["--ranks", "3"],
        {"RANK": "0", "WORLD_SIZE": "2"},
    ),
    "the environment variable WORLD_SIZE must be a number of ranks, got 'two'": (
        [],
        {"RANK": "0", "WORLD_SIZE": "two"},
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_values(sentence: str):
    arguments, environment = WRONG[sentence]
    done = crossdock("doctor", *arguments, **environment)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"crossdock doctor: {sentence}\n")
