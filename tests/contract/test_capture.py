"""What a CUDA graph's capture asks of the rest: a first call in one is refused in words, and what replays use stays.

There is no capture without a GPU: here a backend says what the driver says, and a dispatcher is told that it was
captured.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.backends.base import Backend, Link, Transport, TransportSpec
from crossdock.backends.loopback import LoopbackBackend
from crossdock.testing import LoopbackGroup
from tests.contract.trials import make_config, refused

NOT_PERMITTED = "Triton Error [CUDA]: operation not permitted when stream is capturing"
MOVEMENTS = {
    "dispatch": "dispatch",
    "rows_home": "combine",
    "combine_backward": "combine_backward",
    "dispatch_backward": "dispatch_backward",
}


class Unloaded(Backend):
    """A loopback of which one movement's kernel cannot be loaded, because of what `says`."""

    name, traits = "unloaded", LoopbackBackend.traits

    def __init__(self, movement: str, says: str = NOT_PERMITTED) -> None:
        self._movement, self._says = movement, says

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        def load(*arguments: Any) -> Any:
            raise RuntimeError(self._says)

        transport = LoopbackBackend().open(spec, link)
        setattr(transport, self._movement, load)
        return transport


def there_and_back(dispatcher: cd.TokenDispatcher) -> None:
    x = torch.ones(2, 16, requires_grad=True)
    routed = dispatcher.dispatch(x, torch.ones(2, 1), torch.tensor([[0], [1]]))
    dispatcher.combine(routed.rows, routed.handle).sum().backward()


def opened(backend: str | Backend, *, captured: bool = True) -> cd.TokenDispatcher:
    config = make_config(2, 1, row_capacity=cd.RowCapacity.worst_case())
    dispatcher = cd.TokenDispatcher(config, LoopbackGroup(1).member(0), backend)
    dispatcher._open._use.captured = captured  # as a capture does, which takes a GPU
    return dispatcher


@pytest.mark.parametrize("movement", MOVEMENTS)
def test_kernels_that_a_capture_cannot_load_are_told_of_in_words(movement: str):
    dispatcher = opened(Unloaded(movement))
    told = refused(lambda: there_and_back(dispatcher), cd.ContractViolation)
    assert (
        f"({MOVEMENTS[movement]} of layer '') was the first of its kind and met inside a CUDA graph's capture" in told
    )
    assert "make the same call once before you capture" in told
    assert refused(dispatcher.check, cd.ContractViolation) == told
    dispatcher.close(graphs_destroyed=True)


@pytest.mark.parametrize(("says", "captured"), [(NOT_PERMITTED, False), ("Triton Error [CUDA]: out of memory", True)])
def test_other_errors_stay_what_they_are(says: str, captured: bool):
    dispatcher = opened(Unloaded("dispatch", says), captured=captured)
    with pytest.raises(RuntimeError) as raised:
        there_and_back(dispatcher)
    assert type(raised.value) is RuntimeError and str(raised.value) == says
    dispatcher.close(graphs_destroyed=True)


@pytest.mark.filterwarnings("ignore:.*close\\(graphs_destroyed=True\\) frees it:ResourceWarning")
@pytest.mark.parametrize("destroyed", [False, True])
def test_the_ledger_that_replays_write_to_outlives_the_dispatcher(destroyed: bool):
    dispatcher = opened("loopback")
    there_and_back(dispatcher)
    ledger = weakref.ref(dispatcher._open.accounts.ledger)
    dispatcher.close(graphs_destroyed=destroyed)
    del dispatcher
    gc.collect()
    assert (ledger() is None) == destroyed
