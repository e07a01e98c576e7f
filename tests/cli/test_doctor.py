"""`crossdock doctor`: what it finds, also of packages that are broken."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.cli.commands import crossdock, typed


def test_the_tables():
    done = typed("doctor", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for word in ("python", "torch", "Gloo", "NCCL", "triton", "deep_ep"):
        assert word in said
    assert "local       chosen" in said


def test_installed_is_not_loadable(tmp_path: Path):
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem.so: undefined symbol')\n")
    (tmp_path / "uccl.py").write_text("import os; os._exit(9)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])  # of the processes that load one each
    done = crossdock("doctor", "--json", PYTHONPATH=path)
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert findings["deep_ep"]["status"] == "broken"
    assert "OSError: libnvshmem.so: undefined symbol" in findings["deep_ep"]["detail"]
    assert findings["uccl"]["status"] == "broken"
    assert "exit code 9" in findings["uccl"]["detail"]
    assert findings["Gloo"]["status"] == "ok"
    assert record["backends"]["chosen"] == "local"
    assert {"machine", "versions", "commit", "command"} <= record.keys()
