"""How much memory a piece of work needs at its peak, on Linux: resident bytes beyond what the process had before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth_bytes(work: Callable[[], object]) -> int | None:
    """Run `work`; how far the resident memory of this process rose meanwhile, or None where Linux's /proc is missing.

    Tensors that `work` keeps or frees count alike. A process gives freed memory back late or never, so only the figure
    of a fresh process is sound.
    """
    if not _CLEAR.exists():
        work()
        return None
    _CLEAR.write_text("5")  # the high-water mark starts again from what is resident now (proc(5))
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
