"""What `crossdock doctor` has found out of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: what it belongs to.
        name: of the thing.
        status: "ok", "absent", or "broken": installed, but it does not load.
        detail: version or reason.

    """

    area: str
    name: str
    status: Literal["ok", "absent", "broken"]
    detail: str
