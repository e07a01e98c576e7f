"""`crossdock doctor`: what it finds, also of packages that are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def doctor(*arguments: str, path: Path | None = None) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "crossdock.cli", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tables():
    said = doctor()
    for word in ("python", "torch", "Gloo", "NCCL", "triton", "deep_ep"):
        assert word in said
    assert "local       chosen" in said


def test_installed_is_not_loadable(tmp_path: Path):
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem.so: undefined symbol')\n")
    (tmp_path / "uccl.py").write_text("import os; os._exit(9)\n")
    record: dict[str, Any] = json.loads(doctor("--json", path=tmp_path))
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert findings["deep_ep"]["status"] == "broken"
    assert "OSError: libnvshmem.so: undefined symbol" in findings["deep_ep"]["detail"]
    assert findings["uccl"]["status"] == "broken"
    assert "exit code 9" in findings["uccl"]["detail"]
    assert findings["Gloo"]["status"] == "ok"
    assert record["backends"]["chosen"] == "local"
    assert {"machine", "versions", "commit", "command"} <= record.keys()
