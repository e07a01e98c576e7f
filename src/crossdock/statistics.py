"""A dispatcher's statistics: what its device has counted, in one copy, and what the host knows by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from .accounts import Accounts
from .backends.base import Transport, TransportSpec
from .errors import ContractViolation
from .group.fingerprint import CallFacts
from .group.session import Session
from .host_copy import HostCopy
from .ledger import BY_EXPERT, CALLS, CAPACITY, DEMAND, OVERFLOWS, ROWS, TOKENS, WANTED
from .types import DispatcherStats, LayerStats


class Statistics:
    """Reads them for one dispatcher. Owns the copy that is on its way, and what the host notes of its layers."""

    def __init__(self, spec: TransportSpec, session: Session, transport: Transport, accounts: Accounts) -> None:
        self._bytes_per_row = spec.hidden_dim * spec.dtype.itemsize
        self._session, self._transport, self._accounts = session, transport, accounts
        self._coming: _Copy | None = None
        self._words = dict[str, list[int]]()  # of the last copy: by layer, the ledger's and the bytes of rows sent
        self._other_bytes = 0  # sent, of the same moment
        self._num_rows = dict[str, int]()  # of each layer's last dispatch
        self._num_kept = dict[str, int]()  # rows that its last combine in grad mode keeps for its backward
        self._num_skipped = 0  # steps that the guard has read
        self._skipped_of = Counter[str]()  # the same, by the layers that lacked rows in them

    def note_dispatch(self, layer: str, num_rows: int) -> None:
        """A dispatch has brought rows `[num_rows, hidden_dim]`."""
        self._num_rows[layer] = num_rows

    def note_combine(self, facts: CallFacts, num_rows: int) -> None:
        """A combine of rows `[num_rows, hidden_dim]` begins."""
        if facts.grad_mode:
            self._num_kept[facts.layer] = num_rows if facts.apply_scores else 0

    def note_skipped(self, layers: Iterable[str]) -> None:
        """The guard has not applied a step in which these layers lacked rows, on this rank or another one."""
        self._num_skipped += 1
        self._skipped_of.update(layers)

    def read(self, *, wait: bool) -> DispatcherStats:
        """Up to now; or without a wait, as far as the device has counted them, as of the last copy that has come.

        Raises:
            ContractViolation: inside the capture of a graph, with `wait`.
        """
        num_skipped = self._num_skipped
        if not self._is_capturing():
            self._refresh(wait)
            guard = self._accounts.living_guard()
            num_skipped += guard is not None and guard.has_skipped_unread(wait=wait)
        elif wait:
            raise ContractViolation(
                "stats() waits for the device, which cannot be done inside a capture: call it outside, or with"
                " wait=False"
            )
        layers = {layer: self._of_layer(layer, words) for layer, words in self._words.items()}
        sent_rows_bytes = sum(words[-1] for words in self._words.values())
        return DispatcherStats(
            calls=self._session.num_calls,
            tokens=sum(layer.tokens for layer in layers.values()),
            rows=sum(layer.rows for layer in layers.values()),
            host_syncs=self._transport.num_host_syncs(),
            sent_bytes=self._other_bytes + sent_rows_bytes,
            sent_rows_bytes=sent_rows_bytes,
            skipped_steps=num_skipped,
            layers=layers,
        )

    def _refresh(self, wait: bool) -> None:
        if wait or self._coming is None:
            self._coming = _Copy(self._transport, self._accounts)
        if wait or self._coming.has_arrived():
            self._words, self._other_bytes = self._coming.by_layer(), self._coming.other_bytes
            if wait and self._accounts.opened_ledger is not None:
                self._accounts.opened_ledger.know(self._coming.of_ledger())
            self._coming = None

    def _of_layer(self, layer: str, words: Sequence[int]) -> LayerStats:
        return LayerStats(
            calls=words[CALLS],
            tokens=words[TOKENS],
            rows=words[ROWS],
            rows_wanted=words[WANTED],
            overflows=words[OVERFLOWS],
            largest_demand=words[DEMAND],
            capacity=words[CAPACITY],
            wanted_by_expert=tuple(words[BY_EXPERT:-1]),
            skipped_steps=self._skipped_of[layer],
            bytes_per_row=self._bytes_per_row,
            sent_rows_bytes=words[-1],
            last_rows_bytes=self._num_rows.get(layer, 0) * self._bytes_per_row,
            saved_bytes=self._num_kept.get(layer, 0) * self._bytes_per_row,
        )

    def _is_capturing(self) -> bool:
        ledger = self._accounts.opened_ledger
        return ledger is not None and ledger.is_capturing()


class _Copy:
    """Of all that has been counted by now, on its way to the host."""

    def __init__(self, transport: Transport, accounts: Accounts) -> None:
        ledger, sent = accounts.opened_ledger, transport.sent()
        self.other_bytes = sent.other_bytes
        self._layers, self._senders = [] if ledger is None else ledger.layers, list(sent.layers)
        words = torch.zeros((0, BY_EXPERT), dtype=torch.int64, device="cpu") if ledger is None else ledger.words()
        self._width, self._counted = words.shape[1], list[int]()  # by the host, of the bytes of rows sent
        parts = [words.flatten()]
        if sent.rows_bytes.device == words.device:
            parts.append(sent.rows_bytes)
        else:
            self._counted = sent.rows_bytes.tolist()
        self._copy = HostCopy(torch.cat(parts))

    def has_arrived(self) -> bool:
        return self._copy.has_arrived()

    def by_layer(self) -> dict[str, list[int]]:
        """Every layer's words of the ledger, then the bytes of rows that it has sent; waits for the device."""
        num_bytes = [*self._copy.values()[self._width * len(self._layers) :], *self._counted]
        sent = dict(zip(self._senders, num_bytes, strict=True))
        entered = zip(self._layers, self.of_ledger(), strict=True)
        words = {layer: [*of_layer, sent.pop(layer, 0)] for layer, of_layer in entered}
        return words | {layer: [*[0] * self._width, num_bytes] for layer, num_bytes in sent.items()}

    def of_ledger(self) -> list[list[int]]:
        """The ledger's words by place; waits for the device."""
        flat, width = self._copy.values(), self._width
        return [flat[place * width : (place + 1) * width] for place in range(len(self._layers))]
