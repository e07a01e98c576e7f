"""The rounds in which ranks lay out data and read each other's: the whole protocol, and nothing of what is moved.

    rounds.await_free("rows", call)     every rank has read what this one laid out in that buffer last
    ...                                 lay out
    rounds.publish("rows")              tell every rank: a new round
    rounds.await_published(call)        every rank has laid out its part of this round
    ...                                 read
    rounds.finish_reading()             tell every rank

All ranks make the same rounds in the same order. A rank that runs ahead cannot overwrite what a slow one has not read:
it is held up in `await_free` where the same buffer comes again, and in `await_published` one round later at the latest.
No wait is without a bound; one that ends without what it waited for raises on a CPU. On a GPU, where the host does not
wait, it sets `given_up`, and the next call raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ...group.faults import TransportFault
from ...group.fingerprint import CallFacts
from ...kernels.signal import DEPARTED, LEFT, NUM_KINDS, PUBLISHED, READ, ROUND, Board, launch_send, launch_wait
from ...memory.watch import Watch
from ...memory.workspace import BufferSpec, Workspace
from ..base import Call, TransportSpec

BUFFERS = {"rows": 1, "partials": 2, "scalars": 3}  # the place of each in `Board.state`


def signals_spec(ep_size: int) -> BufferSpec:
    """The buffer that the signals need."""
    return BufferSpec("signals", (NUM_KINDS, ep_size), torch.int64)


class Rounds:
    """One rank's view of the rounds of one opening. Owns the watch; the workspace belongs to the transport.

    Attributes:
        given_up: `[1]` int64 on the device: set once a wait was given up.
    """

    def __init__(
        self,
        spec: TransportSpec,
        workspace: Workspace,
        device: torch.device,
        on_expiry: Callable[[CallFacts | None], None],
    ) -> None:
        self.spec, self._workspace, self._device = spec, workspace, device
        self._pid, on_gpu = os.getpid(), device.type == "cuda"
        self.given_up = torch.zeros(1, dtype=torch.int64, device=device)
        abort = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        status = torch.zeros(2, dtype=torch.int64, pin_memory=on_gpu)
        self.board = Board(
            signals=workspace.own["signals"],
            table=workspace.table["signals"],
            state=torch.zeros(1 + len(BUFFERS), dtype=torch.int64, device=device),
            abort=abort,
            status=status,
            given_up=self.given_up,
            rank=spec.rank,
        )
        # On a CPU the waiting thread raises by itself.
        tell = on_expiry if on_gpu else _tell_nobody
        self.watch = Watch[CallFacts | None](spec.timeout_s, abort, status[:1], tell)

    def await_free(self, buffer: str, call: Call | None) -> None:
        """Wait until every rank has read what this one laid out last in `buffer`."""
        self._wait(READ, BUFFERS[buffer], call)

    def publish(self, buffer: str) -> None:
        """Begin the next round: `buffer` is laid out, and so is the header if this round has one."""
        launch_send(self.board, PUBLISHED, BUFFERS[buffer])

    def await_published(self, call: Call | None) -> None:
        """Wait until every rank has laid out its part of this round."""
        self._wait(PUBLISHED, ROUND, call)

    def finish_reading(self) -> None:
        """Tell every rank that this one has read all it wants of this round."""
        launch_send(self.board, READ)

    def raise_if_given_up(self) -> None:
        """Raise what the host knows by now of a wait that was given up; does not wait.

        Raises:
            TransportFault: peers have left, or did not come in time.
        """
        code = int(self.board.status[1])
        if code == LEFT:
            raise TransportFault("a peer has closed its dispatcher", expired=False)
        if code or self.watch.has_expired:
            raise TransportFault(f"peers did not come within {self.spec.timeout_s:g} s", expired=True)

    def close(self) -> None:
        """Tell every rank that this one leaves, stop the watch, and let go of the workspace; waits for nobody."""
        self.watch.stop()
        del self.board  # it shows the workspace, which is about to be freed
        if os.getpid() != self._pid:
            return  # a forked child's copy: the rank itself is still here
        for rank in range(self.spec.ep_size):
            if rank != self.spec.rank:
                # Pattern last words. No kernel: this may run between two programs of one that is interpreted.
                self._workspace.of_rank("signals", rank)[DEPARTED, self.spec.rank] = 1

    def _wait(self, kind: int, word: int, call: Call | None) -> None:
        self.raise_if_given_up()
        self.watch.begin(None if call is None else call.facts)
        launch_wait(self.board, kind, word)
        if self._device.type != "cuda":
            self.raise_if_given_up()


def _tell_nobody(facts: CallFacts | None) -> None:
    """What a watch tells where the waiting thread raises by itself."""
