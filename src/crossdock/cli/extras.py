"""Packages that are not needed everywhere, and what installs them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

DEMO: Final = ("matplotlib", "safetensors")
_REQUIREMENTS: Final = {
    **{package: package for package in DEMO},
    "transformers": "'transformers>=5.24' accelerate",
    "triton": "'triton>=3.6'",
}


def installed_by(*packages: str) -> str | None:
    """The line that installs them; None where one is none that crossdock makes use of."""
    wanted = [_REQUIREMENTS.get(package) for package in packages]
    return None if None in wanted else f"pip install {' '.join(filter(None, wanted))}"


def why_not_installed(*packages: str) -> str | None:
    """Which of some packages are missing, in one sentence; None if none is."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"{' and '.join(missing)} must be installed: {installed_by(*missing)}" if missing else None
