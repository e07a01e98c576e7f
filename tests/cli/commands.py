"""Running a command inside this process, which costs no interpreter of its own, or as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys

from typer.testing import CliRunner, Result

from crossdock.cli import app

# What the machine that runs the tests says of itself; None is not set.
CLEAN = {"RANK": None, "WORLD_SIZE": None, "COLUMNS": None}


def crossdock(*arguments: str, **environment: str) -> Result:
    """What the command says and its exit code; an error that it lets through is raised here."""
    return CliRunner().invoke(app, list(arguments), env={**CLEAN, **environment}, catch_exceptions=False)


def typed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same of `python -m crossdock.cli`, in a process of its own."""
    return finished(sys.executable, "-m", "crossdock.cli", *arguments, **environment)


def finished(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command says and its exit code."""
    clean = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env={**clean, **environment})
