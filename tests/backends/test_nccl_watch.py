"""The watch over an NCCL communicator: what it says of work that is overdue, and of work that fails before that.

The communicator is a stand-in, since NCCL needs GPUs; all else is what runs there.
"""

from __future__ import annotations

import time

import torch
from torch._C._distributed_c10d import ErrorType

from crossdock.backends.base import Call
from crossdock.backends.loopback import LoopbackGroup
from crossdock.backends.nccl import _Watch
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import resolve_members
from crossdock.group.session import Session

FACTS = CallFacts(3, "combine", "moe")
CALL = Call(FACTS, FACTS.words(), lambda words: None)


class Communicator:
    """What the watch asks of one."""

    def __init__(self) -> None:
        self.error, self.is_aborted = ErrorType.SUCCESS, False

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.is_aborted = True


def watched(timeout_s: float, fails: bool) -> tuple[_Watch, list[tuple[CallFacts | None, float | None]]]:
    """A watch that has given up an exchange which began a tenth of a second before, and what it told the session."""
    told: list[tuple[CallFacts | None, float | None]] = []
    group = Communicator()
    watch = _Watch(timeout_s, torch.device("cpu"), lambda *said: told.append(said), group)
    watch.begin(CALL)
    time.sleep(0.1)
    if fails:
        group.error = ErrorType.REMOTE_ERROR
    deadline = time.monotonic() + 5.0
    while not group.is_aborted and time.monotonic() < deadline:
        time.sleep(0.005)
    watch.note(watch.num_begun)
    watch.stop()
    assert group.is_aborted and watch.has_expired and int(watch.given_up) == 1
    return watch, told


def test_what_fails_early_is_told_with_the_time_that_truly_passed():
    watch, told = watched(20.0, fails=True)
    assert told == [(FACTS, watch.failed_after_s)]
    assert watch.failed_after_s is not None and 0.1 <= watch.failed_after_s < 5.0
    assert str(watch.fault()) == f"an exchange failed {watch.failed_after_s:.1f} s after it had begun, and was aborted"
    assert watch.fault().expired is False


def test_what_is_overdue_is_told_with_the_limit():
    watch, told = watched(0.05, fails=False)
    assert told == [(FACTS, None)]
    assert str(watch.fault()) == "an exchange did not finish within 0.05 s and was aborted"


def test_the_session_tells_the_time_that_truly_passed():
    for failed_after_s, words in ((None, "after 20 s"), (1.5, "after 1.5 s"), (0.2, "at once")):
        session = Session(resolve_members(LoopbackGroup(2).member(0), None), 20.0)
        session.expire(FACTS, failed_after_s)
        assert f"call 3 (combine of layer 'moe') failed {words} (timeout_s is 20)" in str(session.fault)
