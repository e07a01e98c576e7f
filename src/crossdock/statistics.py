"""A dispatcher's statistics: what its device has counted, in one copy, and what the host knows by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .accounts import Accounts
from .backends.base import Transport, TransportSpec
from .group.session import Session
from .ledger import BY_EXPERT, CALLS, CAPACITY, DEMAND, OVERFLOWS, ROWS, TOKENS, WANTED, HostCopy
from .types import DispatcherStats, LayerStats


class Statistics:
    """Reads them for one dispatcher. Owns the copy that is on its way, and keeps the last one that has come."""

    def __init__(self, spec: TransportSpec, session: Session, transport: Transport, accounts: Accounts) -> None:
        self._row_bytes = spec.hidden_dim * spec.dtype.itemsize
        self._session, self._transport, self._accounts = session, transport, accounts
        self._coming: _Copy | None = None
        self._words = dict[str, list[int]]()  # of the last copy: by layer, the ledger's and the bytes of rows sent
        self._sent_bytes = self._sent_rows_bytes = 0

    def read(self, *, wait: bool) -> DispatcherStats:
        """Up to now; or without a wait: as of the last copy that has come, and a newer one is asked for."""
        if wait or self._coming is None:
            self._coming = None if self._is_capturing() else _Copy(self._transport, self._accounts)
        if self._coming is not None and (wait or self._coming.has_arrived()):
            self._words = self._coming.by_layer()
            if wait and self._accounts.opened_ledger is not None:
                self._accounts.opened_ledger.know(self._coming.of_ledger())
            self._sent_rows_bytes = sum(words[-1] for words in self._words.values())
            self._sent_bytes = self._coming.other_bytes + self._sent_rows_bytes
            self._coming = None
        layers = {layer: self._of_layer(layer, words) for layer, words in self._words.items() if words[CALLS]}
        return DispatcherStats(
            calls=self._session.num_calls,
            tokens=sum(layer.tokens for layer in layers.values()),
            rows=sum(layer.rows for layer in layers.values()),
            host_syncs=self._transport.num_host_syncs(),
            sent_bytes=self._sent_bytes,
            sent_rows_bytes=self._sent_rows_bytes,
            skipped_steps=self._accounts.num_skipped(wait=wait),
            layers=layers,
        )

    def _of_layer(self, layer: str, words: Sequence[int]) -> LayerStats:
        num_rows, keeps_rows = self._accounts.held(layer)
        return LayerStats(
            calls=words[CALLS],
            tokens=words[TOKENS],
            rows=words[ROWS],
            rows_wanted=words[WANTED],
            overflows=words[OVERFLOWS],
            largest_demand=words[DEMAND],
            capacity=words[CAPACITY],
            wanted_by_expert=tuple(words[BY_EXPERT:-1]),
            skipped_steps=self._accounts.num_skipped_of(layer),
            row_bytes=self._row_bytes,
            sent_rows_bytes=words[-1],
            buffer_bytes=num_rows * self._row_bytes,
            saved_bytes=num_rows * self._row_bytes if keeps_rows else 0,
        )

    def _is_capturing(self) -> bool:
        ledger = self._accounts.opened_ledger
        return ledger is not None and ledger.is_capturing()


class _Copy:
    """Of all that a device has counted by now, on its way to the host."""

    def __init__(self, transport: Transport, accounts: Accounts) -> None:
        ledger, sent = accounts.opened_ledger, transport.sent()
        self.other_bytes = sent.other_bytes
        self._layers, self._senders = [] if ledger is None else ledger.layers, list(sent.layers)
        words = sent.rows_bytes.new_zeros((0, 1)) if ledger is None else ledger.words()
        self._width = words.shape[1]
        # Of one device both come in one copy; else the bytes have been counted by the host.
        self._copy = HostCopy(torch.cat([words.flatten(), sent.rows_bytes.to(words.device)]))

    def has_arrived(self) -> bool:
        return self._copy.has_arrived()

    def by_layer(self) -> dict[str, list[int]]:
        """Every layer's words of the ledger, then the bytes of rows that it has sent; waits for the device."""
        sent = dict(zip(self._senders, self._copy.values()[self._width * len(self._layers) :], strict=True))
        entered = zip(self._layers, self.of_ledger(), strict=True)
        words = {layer: [*of_layer, sent.pop(layer, 0)] for layer, of_layer in entered}
        return words | {layer: [*[0] * self._width, num_bytes] for layer, num_bytes in sent.items()}

    def of_ledger(self) -> list[list[int]]:
        """The ledger's words by place; waits for the device."""
        flat, width = self._copy.values(), self._width
        return [flat[place * width : (place + 1) * width] for place in range(len(self._layers))]
