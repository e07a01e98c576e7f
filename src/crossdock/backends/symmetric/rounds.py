"""The rounds in which ranks write data for each other and read it: this rank's board, and what the host knows of it.

A round: wait until every rank has read what was written into the same buffer last; write; tell every rank; wait until
every rank has told; read; tell every rank. The launchers of `kernels/` do that, on a GPU inside their kernels.
All ranks make the same rounds in the same order. A rank that runs ahead cannot overwrite what a slow one has not read:
it is held up where the same buffer comes again, and where it waits itself one round later at the latest.

No wait is without a bound. One that ends without what it waited for raises on a CPU. On a GPU, where the host does not
wait, outputs become NaN, nothing waits any more, and the next call that looks raises.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

import torch

from ...group.faults import TransportFault
from ...group.fingerprint import NUM_WORDS as CALL_WORDS
from ...group.fingerprint import CallFacts
from ...kernels.publish import Opening
from ...kernels.signal import (
    ABORT,
    DEPARTED,
    DESK_BEGUN,
    DESK_CALL,
    DESK_CODE,
    DESK_ENDED,
    DIFFERS,
    LAST_TARGET,
    LEFT,
    NUM_DESK,
    NUM_STATE,
    NUM_WORDS,
    Board,
    digest_of,
)
from ...kernels.waits import GivenUp
from ...memory.watch import Watch
from ...memory.workspace import BufferSpec, Workspace
from ..base import Call, TransportSpec

_CALLS_REMEMBERED = 1024  # that the device may be behind the host
_NOTE_POLL_S = 0.01


def signals_spec(ep_size: int) -> BufferSpec:
    """The buffer that the signals need."""
    return BufferSpec("signals", (NUM_WORDS, ep_size), torch.int64)


def notes_spec() -> BufferSpec:
    """The buffer in which ranks that have found a difference tell each other what they called."""
    return BufferSpec("notes", (1 + CALL_WORDS,), torch.int64)


class Rounds:
    """One rank's view of the rounds of one opening. Owns the watch; the workspace belongs to the transport.

    Attributes:
        board: see there.
        last_opening: of the call that was opened last.
    """

    last_opening: Opening

    def __init__(
        self,
        spec: TransportSpec,
        workspace: Workspace,
        device: torch.device,
        on_expiry: Callable[[CallFacts | None], None],
    ) -> None:
        self.spec, self._workspace, self._device = spec, workspace, device
        self._pid, on_gpu = os.getpid(), device.type == "cuda"
        desk = torch.zeros(NUM_DESK, dtype=torch.int64, pin_memory=on_gpu)
        self.board = Board(
            signals=workspace.own["signals"],
            table=workspace.table["signals"],
            state=torch.zeros(NUM_STATE, dtype=torch.int64, device=device),
            desk=desk,
            rank=spec.rank,
        )
        self._told = desk.numpy()  # the same memory: an element of it costs the host a tenth of a tensor's
        self._waiting = _Waiting(self)
        self._recent: OrderedDict[int, Call] = OrderedDict()

        def expire() -> None:
            call = self._recent.get(int(desk[DESK_CALL]))
            on_expiry(None if call is None else call.facts)

        # On a CPU the waiting thread raises by itself.
        tell = expire if on_gpu else _tell_nobody
        abort = self.board.state[ABORT : ABORT + 1]
        self.watch = Watch(spec.timeout_s, abort, desk[DESK_BEGUN : DESK_ENDED + 1], tell)

    def open(self, call: Call) -> Opening:
        """Begin a call: what its first kernel needs.

        Raises:
            TransportFault, ContractViolation: what the host knows by now of an earlier call; does not wait.
        """
        self.look()
        self._recent[call.facts.number] = call
        if len(self._recent) > _CALLS_REMEMBERED:
            self._recent.popitem(last=False)
        self.last_opening = Opening(digest_of(call.words), call.facts.number)
        return self.last_opening

    def waiting(self) -> _Waiting:
        """Around launches: a wait that was given up on a CPU becomes what `look` raises."""
        return self._waiting

    def look(self) -> None:
        """Raise what the host knows by now of a wait that was given up.

        Raises:
            TransportFault: peers have left, or did not come in time.
            ContractViolation: a rank made another call.
        """
        code = int(self._told[DESK_CODE])
        if code == LEFT:
            raise TransportFault("a peer has closed its dispatcher, or has given up", expired=False)
        if code == DIFFERS:
            self._tell_difference()
        if code or self.watch.has_expired:
            raise TransportFault(f"peers did not come within {self.spec.timeout_s:g} s", expired=True)

    def leave(self) -> None:
        """Tell every rank that this one makes no further round; waits for nobody."""
        for rank in range(self.spec.ep_size):
            if rank != self.spec.rank:
                # Pattern last words. No kernel: this may run between two programs of one that is interpreted.
                self._workspace.of_rank("signals", rank)[DEPARTED, self.spec.rank] = 1

    def close(self) -> None:
        """Leave, stop the watch, and let go of the workspace."""
        self.watch.stop()
        del self.board  # it shows the workspace, which is about to be freed
        if os.getpid() == self._pid:  # else a forked child's copy: the rank itself is still here
            self.leave()

    def _tell_difference(self) -> None:
        """Tell the others what this rank has called, and compare with what they tell: all have found the difference."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # nothing of ours waits any more
        call = self._recent.get(int(self.board.desk[DESK_CALL]))
        if call is None:
            raise TransportFault("ranks made different calls, and this one's is long past", expired=False)
        number = int(self.board.state[LAST_TARGET])
        self._workspace.own["notes"].copy_(torch.tensor([number, *call.words]))
        deadline = time.monotonic() + self.spec.timeout_s
        while time.monotonic() < deadline:
            told = [self._workspace.of_rank("notes", rank).tolist() for rank in range(self.spec.ep_size)]
            if all(note[0] == number for note in told):
                call.verify([note[1:] for note in told])
                break
            time.sleep(_NOTE_POLL_S)


class _Waiting:
    """See `Rounds.waiting`."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = weakref.proxy(rounds)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GivenUp):
            self._rounds.look()


def _tell_nobody() -> None:
    """What a watch tells where the waiting thread raises by itself."""
