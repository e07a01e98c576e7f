"""The header of every call: laid out with its first round, and compared by every rank before it uses what came."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from ...group.fingerprint import NUM_WORDS
from ...kernels.header import launch_read_headers
from ...memory.workspace import BufferSpec, Workspace
from ..base import Call
from .rounds import Rounds

TOKENS = NUM_WORDS  # the place of T in a header; the fingerprint stands before it
HEADER_WORDS = NUM_WORDS + 1


def headers_spec() -> BufferSpec:
    """The buffer that the headers need: two, see `kernels/header.py`."""
    return BufferSpec("headers", (2, HEADER_WORDS), torch.int64)


class _Unread(NamedTuple):
    """Headers on their way to the host: there once the device has come past wait `place`."""

    place: int
    call: Call
    words: torch.Tensor


class Headers:
    """Lays out this rank's headers and compares those of all.

    On a CPU they are compared at once. On a GPU only dispatch waits for the host; the headers of other calls are copied
    to pinned memory in stream order and compared as soon as the host can see, without waiting, that they are there.
    """

    def __init__(self, workspace: Workspace, rounds: Rounds, device: torch.device) -> None:
        self._workspace, self._rounds, self._device = workspace, rounds, device
        self._unread: deque[_Unread] = deque()

    def write(self, call: Call | None, num_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What a kernel needs to lay out this call's header: words, headers, state; None without a call to open."""
        if call is None:
            return None
        self.look_back()
        on_host = torch.tensor([*call.words, num_tokens], pin_memory=self._device.type == "cuda")
        return on_host.to(self._device, non_blocking=True), self._workspace.own["headers"], self._rounds.board.state

    def read(self, heard: torch.Tensor) -> None:
        """Fill `heard [ep_size, W]` with every rank's header of this round."""
        launch_read_headers(self._workspace.table["headers"], self._rounds.board.state, heard)

    def compare(self, call: Call | None) -> None:
        """Read and compare the headers of a call whose sizes are known; nothing without a call to open.

        Raises:
            ContractViolation: a rank made another call.
        """
        if call is None:
            return
        heard = torch.empty(self._rounds.board.ep_size, HEADER_WORDS, dtype=torch.int64, device=self._device)
        self.read(heard)
        if self._device.type != "cuda":
            call.verify(heard[:, :NUM_WORDS].tolist())
            return
        words = torch.empty(heard.shape, dtype=torch.int64, pin_memory=True)
        words.copy_(heard, non_blocking=True)
        self._unread.append(_Unread(self._rounds.watch.num_begun, call, words))

    def look_back(self) -> None:
        """Compare the headers of earlier calls that have reached the host.

        A copy is there once a wait behind it has ended: work of a stream ends in its order.
        """
        while self._unread and self._unread[0].place < self._rounds.watch.num_ended():
            unread = self._unread.popleft()
            unread.call.verify(unread.words[:, :NUM_WORDS].tolist())
