"""Files that a command will write, looked at before it begins."""

from __future__ import annotations

from pathlib import Path


def why_not_written(option: str, path: Path | None) -> str | None:
    """Why the file that `option` names cannot be written, in one sentence; None if it can, or none was asked for."""
    if path is None:
        return None
    if not path.absolute().parent.is_dir():
        return f"{option} {path} is in a folder that does not exist"
    if path.is_dir():
        return f"{option} {path} is a folder, it must be a file"
    return None
