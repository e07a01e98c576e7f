"""Every example runs as its docstring says, is short, and says what it showed."""

from __future__ import annotations

import importlib
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
TYPED = "moe_layer.py"  # the others run inside this process, whose ranks need not import torch again


@pytest.mark.parametrize("name", sorted(SHOWN.keys() - {TYPED}))
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    example = importlib.import_module(f"examples.{name.removesuffix('.py')}")  # as its ranks find its functions too
    monkeypatch.setattr(sys, "argv", [name])
    example.main()
    assert SHOWN[name] in capsys.readouterr().out


def test_an_example_runs_as_its_first_lines_say():
    command = [sys.executable, str(EXAMPLES / TYPED)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stdout + found.stderr
    assert SHOWN[TYPED] in found.stdout


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == SHOWN.keys() and max(lengths.values()) < 300


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
