"""How long the exchanges of one call may take together: a rank may come late, and stop between two of them."""

from __future__ import annotations

import time

_LATE_ROWS_S = 2.0  # of the 5 s that are promised beyond `timeout_s`; finding out who is missing takes up to 2
_LEAST_S = 0.01  # Gloo takes 0 for no limit, and rounds down to milliseconds
_NO_CALL = -2  # the opening is call -1
_now = time.monotonic


class CallClock:
    """The first exchange of a call has all of `timeout_s`.

    Later ones have what is left of it, and a little more, for the rows of a rank that came at the last moment.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._number, self._until = timeout_s, _NO_CALL, 0.0

    def enter(self, number: int) -> None:
        """The exchanges of this call begin, unless they have."""
        if number != self._number:
            self._number, self._until = number, _now() + self._timeout_s

    def deadline(self) -> float:
        """When the next exchange has to be done, on the clock of `left_s`."""
        return _now() + max(min(self._until + _LATE_ROWS_S - _now(), self._timeout_s), _LEAST_S)

    @staticmethod
    def left_s(deadline: float) -> float:
        """Seconds until then; at least some hundredths."""
        return max(deadline - _now(), _LEAST_S)

    @staticmethod
    def is_over(deadline: float) -> bool:
        """Whether it has come, or is so near that a wait for it has ended."""
        return _now() + _LEAST_S >= deadline
