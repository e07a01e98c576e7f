"""Every example runs as its docstring says, is short, and says what it showed."""

from __future__ import annotations

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


def test_wrong_dials_are_one_sentence():
    for name, dial in (("moe_layer.py", "--num-experts=7"), ("train.py", "--depth=0")):
        found = run(name, dial)
        assert found.returncode == 2
        assert f"error: {dial.split('=')[0]} must be" in found.stderr
        assert "Traceback" not in found.stderr
