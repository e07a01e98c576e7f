"""The demo's text is read once by a process; every other path has its own."""

from __future__ import annotations

from pathlib import Path

from crossdock.cli.demo.data import load_text


def test_text_is_read_once(tmp_path: Path):
    (tmp_path / "a.txt").write_text("crossdock " * 4000)
    assert load_text(None) is load_text(None)
    assert load_text(tmp_path) is not load_text(None)
