"""What a session is of: a dispatcher, or an overflow guard in one group."""

from __future__ import annotations

from typing import NamedTuple


class Purpose(NamedTuple):
    """What messages say of it, and what it opens by.

    Attributes:
        name: as in "this dispatcher".
        opened: what ranks open, and when, where nobody asks for that.
        gone: why one that is there no more does not answer.
        prefix: in the store, under which its rounds of opening are counted.
        operation: of its opening, which is a call like those that follow.
    """

    name: str
    opened: str
    gone: str
    prefix: str
    operation: str


DISPATCHER = Purpose("dispatcher", "a dispatcher", "its dispatcher was closed", "crossdock", "dispatch")
GUARD = Purpose(
    "overflow guard",
    "an overflow guard (at its first step)",
    "its overflow guard was dropped",
    "crossdock/guard",
    "step",
)
