"""`crossdock --version`: what a report of a trouble should say, without loading what it names."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import crossdock as cd
from tests.cli.commands import crossdock, finished, typed

LOADED = """
import sys, torch
from crossdock.cli import app
app(["--version"], standalone_mode=False)
print("triton" in sys.modules, torch.cuda.is_initialized())
"""


def test_the_versions_in_two_lines():
    done = typed("--version")
    assert (done.returncode, done.stderr) == (0, "")
    triton = f"triton {version('triton')}" if find_spec("triton") is not None else "triton is not installed"
    python = f"Python {platform.python_version()}"
    assert done.stdout == f"crossdock {cd.__version__}\n{python}, torch {version('torch')}, {triton}\n"


def test_neither_triton_nor_cuda_is_loaded():
    assert finished(sys.executable, "-c", LOADED).stdout.splitlines()[-1] == "False False"


def test_without_a_command_there_is_help():
    shown = crossdock()
    assert "One token dispatcher for expert-parallel" in shown.output and "--version" in shown.output
    assert {"demo", "verify", "bench", "doctor"} <= set(shown.output.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("redirected", "code", "sentence"),
    [
        (">/dev/full", 1, "crossdock: the output could not be written: No space left on device\n"),
        pytest.param(">&-", 0, "", marks=pytest.mark.full),
        pytest.param("| true", 0, "", marks=pytest.mark.full),  # the code is that of `true`
    ],
)
def test_an_output_that_nobody_takes(redirected: str, code: int, sentence: str):
    done = finished("sh", "-c", f"{sys.executable} -m crossdock.cli doctor --help {redirected}")
    assert (done.returncode, done.stdout) == (code, "") and done.stderr == sentence
