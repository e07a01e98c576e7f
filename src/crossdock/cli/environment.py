"""What a run should say about where it ran: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import crossdock
from crossdock.kernels.digest import kernels_digest


def describe_run() -> dict[str, Any]:
    """Machine, versions, commit (None outside a checkout), kernels and command, as plain JSON values."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "kernels": kernels_digest(),
        "command": shlex.join(["crossdock", *sys.argv[1:]]),
    }


def machine() -> dict[str, Any]:
    """The system, the processors and the GPUs."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str | None]:
    """Python's, ours and those of the libraries that matter; None where one is not installed."""
    libraries = {name: installed_version(name) for name in ("torch", "numpy", "triton")}
    return {
        "python": platform.python_version(),
        "crossdock": crossdock.__version__,
        **libraries,
        "cuda": torch.version.cuda,
    }


def installed_version(package: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this package is imported from, with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
