"""Records of runs on GPUs belong to the kernels that are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossdock.kernels.digest import kernels_digest, syntax

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VERIFIED = sorted(RESULTS.glob("verify_symmetric_*.json"))


def test_digest():
    assert kernels_digest() == kernels_digest() and len(kernels_digest()) == 64
    assert syntax("x = 1  # a comment") == syntax("x = (1)") != syntax("x = 2")
    assert syntax('"""A module."""\nclass A:\n    """A class."""\n    x = 1') == syntax("class A:\n    x = 1")
    assert syntax("def f():\n    'text'") != syntax("def f():\n    return 'text'")


@pytest.mark.skipif(not VERIFIED, reason="there is no record of the suite on GPUs (verify_symmetric_*.json) yet")
@pytest.mark.parametrize("path", VERIFIED or [RESULTS], ids=lambda path: path.name)
def test_the_verified_kernels_are_these(path):
    record = json.loads(path.read_text())
    assert record["all_passed"] and not [cell for cell in record["cells"] if cell["status"] == "failed"]
    assert record["device"] == "cuda" and record["backend"] == "symmetric"
    assert record["ranks"] >= 2
    assert len(record["machine"]["gpus"]) >= record["ranks"] or record["ranks_share_gpus"]
    assert record["kernels"] == kernels_digest(), f"{path.name} was made with other kernels: run verify on GPUs again"
