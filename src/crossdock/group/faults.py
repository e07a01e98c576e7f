"""What a transport raises when a peer does not take part; the session turns it into a `PeerTimeout`."""

from __future__ import annotations

from collections.abc import Sequence


class TransportFault(Exception):
    """A transport could not finish a call: raised by wires and backends, turned into a `PeerTimeout` by the session.

    `blamed` names the missing ranks where the transport knows them itself; otherwise the session asks the peers.
    `expired` tells whether it has waited for the whole `timeout_s` in one exchange; None if it does not know.
    """

    def __init__(self, message: str, blamed: Sequence[int] = (), *, expired: bool | None = None) -> None:
        super().__init__(message)
        self.blamed, self.expired = tuple(blamed), expired
