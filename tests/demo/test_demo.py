"""The whole demo as a user runs it, three steps long; alone, under torchrun, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

DEMO = "from crossdock.cli import main; main()"


def finished(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(2000)))
    return path


def test_the_whole_demo(tmp_path: Path):
    out = tmp_path / "out"
    more = ("--steps", "3", "--seed", "7", "--out", str(out), "--json", str(tmp_path / "copy.json"))
    run = finished(sys.executable, "-c", DEMO, "demo", *more)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all 8 hold" in run.stdout
    assert "step 3 of 3: loss" in run.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["all_hold"]
    assert [claim["holds"] for claim in report["claims"]] == [True] * 8
    assert len(report["training"]["losses"]) == 3
    assert report["training"]["held_out_after"] < report["training"]["held_out_before"]
    assert {"machine", "versions", "settings", "seconds"} < report.keys()
    assert json.loads((tmp_path / "copy.json").read_text()) == report
    for picture in ("loss.png", "expert_load.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("blocks.0.moe.experts.gate_proj").shape == (16, 128, 256)


# The demo with a smaller model, which no option asks for.
SMALL_DEMO = """
from crossdock.cli.demo import settings
defaults = settings.ModelSizes.__init__.__kwdefaults__
defaults.update(hidden_dim=32, ffn_dim=16, num_experts=8, seq_len=64)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun's ranks meet over Gloo on Linux and macOS")
@pytest.mark.full  # half a minute; `verify` and README's program run under torchrun every time
@pytest.mark.parametrize("small", [True, False], ids=["small", "whole"])
def test_under_torchrun(tmp_path: Path, text: Path, small: bool):
    (tmp_path / "demo.py").write_text(f"{SMALL_DEMO if small else ''}{DEMO}\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    backend = "all_to_all" if small else "auto"  # which takes the interpreter for one of the proofs
    more = ("--steps", "2", "--backend", backend, "--data", str(text), "--out", str(tmp_path / "out"))
    run = finished(*torchrun, str(tmp_path / "demo.py"), "demo", *more)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all 8 hold") == 1
    assert "EP 1 and EP 4" in json.loads((tmp_path / "out" / "report.json").read_text())["claims"][2]["claim"]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ctrl_c_ends_all_ranks(tmp_path: Path, text: Path):
    command = (sys.executable, "-c", DEMO, "demo", "--steps", "100000", "--data", str(text), "--out", str(tmp_path))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        assert any("step " in line and "loss" in line for line in run.stdout), run.stderr
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        _, errors = run.communicate(timeout=20)
    assert run.returncode == 130
    assert errors.strip() == "interrupted; all ranks have ended"
    deadline = time.monotonic() + 10
    while group_lives(run.pid):
        assert time.monotonic() < deadline, "a process of the demo outlived it"
        time.sleep(0.05)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
