"""Files that a command will write, looked at before it begins."""

from __future__ import annotations

import sys
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


def write_record(command: str, option: str, path: Path, content: str) -> bool:
    """Write what was measured, behind everything that is printed; False, and a sentence, where that cannot be done."""
    try:
        path.write_text(content)
    except OSError as error:
        print(f"crossdock {command}: {option} {path} could not be written: {error.strerror}", file=sys.stderr)
        return False
    return True
