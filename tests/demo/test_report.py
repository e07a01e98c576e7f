"""What the demo prints at its end: every number whole, every layer told apart, on any stdout."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from crossdock.cli.demo import report
from crossdock.cli.demo.claims import Claim
from crossdock.cli.demo.layers import LayerLine, told_apart
from crossdock.cli.demo.progress import TrainingDisplay
from crossdock.cli.demo.settings import Job
from crossdock.cli.demo.train import Trained
from crossdock.cli.output import print_whole

LINE = LayerLine(
    run="training", layer="blocks.0.moe", dispatches=308, tokens=630_784, rows=1_261_568, dropped=0, imbalance=1.92,
    row_capacity="exact()", capacity=None, fill=None, overflows=0, sent_rows_bytes=640_000_000, saved_bytes=2_097_152,
)  # fmt: skip
GROWN = replace(LINE, run="capacity", row_capacity="calibrated(1.5)", dropped=12_345, overflows=12, capacity=0)
LINES = (
    LINE,
    replace(LINE, layer="blocks.1.moe", rows=9_876_543),
    GROWN,
    replace(GROWN, layer="blocks.1.moe", capacity=12_345, fill=0.87),
    replace(GROWN, layer="blocks.2.moe", capacity=None),
)
CLAIMS = [Claim("it holds", "tried", True, "the same bits", LINES), Claim("it does not", "tried", False, "they differ")]
TRAINED = Trained(
    source="text", num_bytes=1, num_parameters=1, num_ranks=1, device="cpu", backend="local", losses=[1.0],
    gradient_norms=[1.0], tokens_per_s=[1.0], tokens_per_expert=[[[1, 1]]], held_out_before=1.0, held_out_after=1.0,
    sent_bytes=0.0, claims=[],
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 150])
def test_numbers_of_layers_are_whole(width: int):
    written = io.StringIO()
    print_whole(Console(file=written, width=width), report.layers_table(CLAIMS))
    lines = [line.split() for line in written.getvalue().splitlines() if line.strip()]
    assert " ".join(lines[0]) == "layer calls rows dropped busiest capacity MB sent MB kept"
    assert lines[2:] == [
        ["training"],
        ["0", "308", "1,261,568", "none", "1.92", "exact", "640.0", "2.1"],
        ["1", "308", "9,876,543", "none", "1.92", "exact", "640.0", "2.1"],
        ["capacity"],
        ["0", "308", "1,261,568", "12,345", "in", "12", "1.92", "just", "changed", "640.0", "2.1"],
        ["1", "308", "1,261,568", "12,345", "in", "12", "1.92", "12,345,", "87%", "640.0", "2.1"],
        ["2", "308", "1,261,568", "12,345", "in", "12", "1.92", "just", "measured", "640.0", "2.1"],
    ]


def test_names_of_layers_are_told_apart():
    assert told_apart(["a.1.moe.b", "a.2.moe.b", "a.10.moe.b"]) == ["1", "2", "10"]
    assert told_apart(["a.1.up", "a.1.down", "a.2.up"]) == ["1.up", "1.down", "2.up"]
    assert told_apart(["a", "a.b"]) == ["a", "a.b"]
    assert told_apart(["a.b.b", "a.b"]) == ["a.b.b", "a.b"]
    assert told_apart(["moe", "moe"]) == ["moe", "moe"] and told_apart([]) == []


@pytest.mark.parametrize(("encoding", "yes", "no"), [("latin-1", "yes", "NO"), ("utf-8", "✓", "✗")])
def test_any_stdout_takes_the_verdict(encoding: str, yes: str, no: str, monkeypatch: pytest.MonkeyPatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    job = Job(steps=1, seed=0, backend="auto", data=None, out=Path("out"))
    report.introduce(Console(file=written, width=60), job, 1)
    report.tell(Console(file=written, width=60), job, TRAINED, CLAIMS, 12.3)
    written.seek(0)
    said = written.read().splitlines()
    assert " 16 experts (top 2) on 1 rank, 1 step of 1,024 bytes of text" in said[0]
    assert said[-1] == "1 of 2 did not hold, after 12 s" and f"Written to out/: {report.LOSS}, " in said[-2]
    for claim, mark in (("it holds", yes), ("it does not", no)):
        assert any(claim in line and mark in line for line in said)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_lines_of_a_terminal_do_not_wrap(encoding: str, monkeypatch: pytest.MonkeyPatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    display = TrainingDisplay(1000, shown=True)
    console = Console(file=written, width=80)
    console.print(display._drawn([[0, 16_384, *[1024] * 14], [1024] * 16]))
    written.seek(0)
    bar, *layers = written.read().splitlines()
    assert "0/1000" in bar and len(layers) == 2
    assert layers[0].endswith("  0 to 16,384 tokens, busiest 8.53 x the mean")
