"""Every example runs as its docstring says, is short, and says what it showed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN = {
    "moe_layer.py": "gradient of expert weights   same bits",
    "sync_free.py": "parameters and optimizer state   same bits",
    "train.py": "loss of the first five steps",
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name: str):
    found = run(name)
    assert found.returncode == 0, found.stdout + found.stderr
    assert SHOWN[name] in found.stdout
    assert len((EXAMPLES / name).read_text().splitlines()) < 300


@pytest.mark.parametrize(
    ("name", "dial"), [("moe_layer.py", "--num-experts=7"), ("train.py", "--depth=0"), ("sync_free.py", "--hot-step=0")]
)
def test_a_wrong_dial_is_one_sentence(
    name: str, dial: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", [name, dial])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert end.value.code == 2
    assert f"error: {dial.split('=')[0]} must be" in capsys.readouterr().err
