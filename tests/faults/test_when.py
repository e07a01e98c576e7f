"""When ranks were found to be missing, as the message tells it: at once, or after as long a wait as there was."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

import crossdock as cd
from crossdock.group.faults import TransportFault
from crossdock.testing import LoopbackGroup
from tests.faults.play import TIMEOUT_S, Account, config, observe, step
from tests.faults.test_loopback import on_threads, opened

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "does not come"])
def test_a_message_says_when(closes: bool):
    done = threading.Barrier(2)

    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        if rank == 1 and closes:
            dispatcher.close()
        account = observe(dispatcher, lambda: step(dispatcher)) if rank == 0 else Account()
        done.wait(10.0)
        return account

    message = on_threads(work, LoopbackGroup(2))[0].message
    when = "at once" if closes else r"after [1-5](\.\d)? s"
    where = r"call 2 \(dispatch of layer 'blocks.7.moe'\)"
    assert re.match(rf"ranks \[1\] were missing in {where}, found {when} \(timeout_s is {TIMEOUT_S:g}\): ", message)


@pytest.mark.parametrize("timeout_s", [0.5, TIMEOUT_S])
@pytest.mark.parametrize("expired", [True, False], ids=["expired", "left"])
def test_a_wait_of_an_earlier_call_is_as_long_as_it_was(expired: bool, timeout_s: float):
    """A device gives up a wait that the host has left behind: what the next call looks at tells of it in no time."""

    def look() -> None:
        raise TransportFault("told by the device", expired=expired)

    with cd.TokenDispatcher(config(timeout_s=timeout_s)) as dispatcher:
        step(dispatcher)
        with pytest.raises(cd.PeerTimeout) as told:
            dispatcher._open.session.probe(look)
    when = f"after {timeout_s:g} s" if expired else "at once"
    assert f" failed {when} (timeout_s is {timeout_s:g}), although every rank still answers: " in str(told.value)
