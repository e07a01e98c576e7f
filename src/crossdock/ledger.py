"""What every dispatch asked for and got, by layer, without a wait of the host.

A dispatcher's ledger is written once per dispatch, in every mode. On a GPU the device writes it, in one launch, so that
a replayed graph counts like an eager call; the host looks at two words of pinned memory and copies the rest only when
somebody asks. On a CPU it is plain integers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from .host_copy import HostCopy
from .kernels.account import Account
from .layer_counters import LayerCounters
from .types import OnOverflow

# A layer's words, then one for each local expert: rows wanted.
CALLS, TOKENS, ROWS, WANTED, OVERFLOWS, DEMAND, CAPACITY, PEAK, OVERFLOW_PEAK, BY_EXPERT = range(10)
# The words of trouble, counted over all layers; layer, demand and capacity are of the first overflow to be raised.
OVERFLOW, LAYER, FIRST_DEMAND, FIRST_CAPACITY, BAD_IDS, REPEATS, NUM_TROUBLES = range(7)
TOKENS_OF_PEAK = 2**20  # a peak is a demand per so many tokens: one number that is compared across calls and ranks
_COPY_EVERY_S = 1.0  # how often the device's words are sent to the host where nobody asks for them
_POLICIES: tuple[OnOverflow, ...] = ("drop", "skip_step", "raise")
_now = time.monotonic


class Entry(NamedTuple):
    """One dispatch, as it is written down.

    Attributes:
        layer: its name.
        num_tokens: T.
        capacity: rows it was sized to; -1 under `exact`.
        wanted: `[e]` int64: rows asked for by local expert.
        kept: `[e]` int64: rows that fit.
        expert_offsets: `[e]` int32: inclusive padded ends of what fits.
        bad_ids: `[ep_size]` int64: ids outside the range.
        num_tokens_per_rank: the bound of this call on every rank's tokens.
        on_overflow: the layer's policy.
    """

    layer: str
    num_tokens: int
    capacity: int
    wanted: Tensor
    kept: Tensor
    expert_offsets: Tensor
    bad_ids: Tensor
    num_tokens_per_rank: int = 1
    on_overflow: OnOverflow = "raise"

    @property
    def policy(self) -> int:
        """`on_overflow` as a number: 0 counts, 1 flags as well, 2 raises as well."""
        return _POLICIES.index(self.on_overflow)


class Trouble(NamedTuple):
    """What the ledger has counted that somebody has to be told of; `layer` and the two sizes are the first overflow's.

    Attributes:
        overflows: dispatches of which rows were dropped, under `on_overflow="raise"`.
        layer: where.
        demand: rows, padding included, that it asked for.
        capacity: rows it was sized to.
        bad_ids: ids outside the range, on a GPU; they acted as -1.
        repeats: tokens, on a GPU, that named an expert twice although `distinct_experts=True` was declared.
    """

    overflows: int
    layer: str
    demand: int
    capacity: int
    bad_ids: int
    repeats: int


class Drop(NamedTuple):
    """A layer that has dropped rows: how many, of all that were wanted of it so far."""

    layer: str
    num_dropped: int
    num_wanted: int


class Ledger(ABC):
    """The accounts of one dispatcher.

    Attributes:
        overflowed: `[1]` float32 on the device: 1 once a dispatch has dropped rows, under another policy than "drop",
            like torch's `found_inf`; `take` sets it back to 0.
    """

    def __init__(self, alignment: int, num_local_experts: int, device: torch.device) -> None:
        self.alignment, self.num_local_experts = alignment, num_local_experts
        self.overflowed = torch.zeros(1, device=device)

    @abstractmethod
    def enter(self, entry: Entry) -> Tensor:
        """Write a dispatch down; returns `[1]` int64 on the device: the end of its last expert's rows."""

    def account(self, layer: str, on_overflow: OnOverflow) -> Account | None:
        """Where the device may enter a dispatch of this layer in the place of `enter`; None: it may not."""
        return None

    @abstractmethod
    def note_repeats(self, expert_ids: Tensor) -> None:
        """Count tokens that name an expert twice in `expert_ids [T, top_k]`, where nobody has looked before."""

    @abstractmethod
    def told(self) -> tuple[int, int, int]:
        """Overflows, bad ids and repeats that are known of so far; does not wait."""

    def is_capturing(self) -> bool:
        """Whether calls are being captured in a graph at the moment, when nothing can be copied to the host."""
        return self.overflowed.is_cuda and torch.cuda.is_current_stream_capturing()

    @abstractmethod
    def drop(self) -> Drop | None:
        """The first layer known to have dropped rows, under another policy than "drop", since `take`; does not wait."""

    def know(self, words: list[list[int]]) -> None:
        """Take what `words` gave just now, for which somebody has waited."""

    @abstractmethod
    def trouble(self) -> Trouble:
        """All that has gone wrong; waits for the device."""

    @property
    @abstractmethod
    def layers(self) -> list[str]:
        """Every layer that has dispatched, in that order."""

    @abstractmethod
    def words(self) -> Tensor:
        """A copy of every layer's words, `[L, BY_EXPERT + num_local_experts]` int64 on the device; does not wait."""

    @abstractmethod
    def take(self) -> Tensor:
        """What has come since the last call, for whoever decides on a step, and forget it; does not wait.

        `[1 + 2 L]` int64 on the device for L layers: whether rows were dropped; by layer the largest demand (rows with
        padding per 2**20 tokens of the call's bound) of those dispatches; and that of all dispatches.
        """

    @abstractmethod
    def forget_fill(self, layer: str) -> None:
        """Begin a layer's largest demand anew: its capacity has changed."""


def _first_drop(layers: list[str], words_of_layers: list[list[int]]) -> Drop | None:
    for layer, words in zip(layers, words_of_layers, strict=False):  # of the latest layers nothing may be known yet
        if words[OVERFLOW_PEAK]:
            return Drop(layer, words[WANTED] - words[ROWS], words[WANTED])
    return None


class HostLedger(Ledger):
    """Of a dispatcher on a CPU."""

    def __init__(self, alignment: int, num_local_experts: int, device: torch.device) -> None:
        super().__init__(alignment, num_local_experts, device)
        self._pages: dict[str, list[int]] = {}
        self._trouble = Trouble(0, "", 0, 0, 0, 0)
        self._has_dropped = False

    def enter(self, entry: Entry) -> Tensor:
        wanted, kept = entry.wanted.tolist(), sum(entry.kept.tolist())
        words = self._pages.setdefault(entry.layer, [0] * (BY_EXPERT + self.num_local_experts))
        alignment = self.alignment
        total, demand = sum(wanted), sum(-(-rows // alignment) * alignment for rows in wanted)
        overflows = int(total > kept)
        for place, value in ((CALLS, 1), (TOKENS, entry.num_tokens), (ROWS, kept), (WANTED, total)):
            words[place] += value
        words[OVERFLOWS] += overflows
        if is_tighter(demand, entry.capacity, words[DEMAND], words[CAPACITY]):
            words[DEMAND], words[CAPACITY] = demand, entry.capacity
        words[BY_EXPERT:] = [before + rows for before, rows in zip(words[BY_EXPERT:], wanted, strict=True)]
        peak = -(-(demand * TOKENS_OF_PEAK) // entry.num_tokens_per_rank)
        words[PEAK] = max(words[PEAK], peak)
        if overflows and entry.policy > 0:
            self.overflowed.fill_(1.0)
            words[OVERFLOW_PEAK] = max(words[OVERFLOW_PEAK], peak)
            self._has_dropped = True
        if overflows and entry.policy > 1:
            if not self._trouble.overflows:
                self._trouble = self._trouble._replace(layer=entry.layer, demand=demand, capacity=entry.capacity)
            self._trouble = self._trouble._replace(overflows=self._trouble.overflows + 1)
        return entry.expert_offsets[-1:].to(torch.int64)

    def take(self) -> Tensor:
        pages = self._pages.values()
        peaks = [words[place] for place in (OVERFLOW_PEAK, PEAK) for words in pages]
        taken = torch.tensor([int(self.overflowed), *peaks], device=self.overflowed.device)
        self.overflowed.zero_()
        self._has_dropped = False
        for words in pages:
            words[PEAK] = words[OVERFLOW_PEAK] = 0
        return taken

    def forget_fill(self, layer: str) -> None:
        if layer in self._pages:
            words = self._pages[layer]
            words[DEMAND] = words[CAPACITY] = 0

    def note_repeats(self, expert_ids: Tensor) -> None:
        """On a CPU they were refused."""

    def told(self) -> tuple[int, int, int]:
        return self._trouble.overflows, 0, 0

    def drop(self) -> Drop | None:
        return _first_drop(self.layers, list(self._pages.values())) if self._has_dropped else None

    def trouble(self) -> Trouble:
        return self._trouble

    @property
    def layers(self) -> list[str]:
        return list(self._pages)

    def words(self) -> Tensor:
        width = BY_EXPERT + self.num_local_experts
        return torch.tensor(list(self._pages.values()), dtype=torch.int64, device="cpu").view(-1, width)


def is_tighter(demand: int, capacity: int, demand_before: int, capacity_before: int) -> bool:
    """Whether a demand takes up more of its capacity than the one before; of two without one, the larger does."""
    if capacity_before == 0:  # nothing has come before
        return True
    if capacity < 0 or capacity_before < 0:
        return capacity > 0 or (capacity_before < 0 and demand > demand_before)
    return demand * capacity_before > demand_before * capacity


class DeviceLedger(Ledger):
    """Of a dispatcher on a GPU. Its memory never moves, since graphs have its addresses."""

    def __init__(self, alignment: int, num_local_experts: int, device: torch.device) -> None:
        super().__init__(alignment, num_local_experts, device)
        self._troubles = torch.zeros(NUM_TROUBLES, dtype=torch.int64, device=device)
        self._told = torch.zeros(NUM_TROUBLES, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._counters = LayerCounters(BY_EXPERT + num_local_experts, device)
        self._seen: list[list[int]] = []  # every layer's words as the host knows them, which may be old
        self._copy: HostCopy | None = None  # newer ones
        self._copied_at = float("-inf")

    def enter(self, entry: Entry) -> Tensor:
        from .kernels.tally import launch_tally

        return launch_tally(entry, self.account(entry.layer, entry.on_overflow), self.alignment)

    def account(self, layer: str, on_overflow: OnOverflow) -> Account:
        place, words = self._counters.of(layer)
        return Account(words, self._troubles, self._told, self.overflowed, place, _POLICIES.index(on_overflow))

    def take(self) -> Tensor:
        words = self.words()
        taken = torch.cat([self.overflowed.to(torch.int64), words[:, OVERFLOW_PEAK], words[:, PEAK]])
        self.overflowed.zero_()
        self._counters.zero(slice(PEAK, OVERFLOW_PEAK + 1))
        self._seen, self._copy = [], None
        return taken

    def forget_fill(self, layer: str) -> None:
        if layer in self._counters:
            self._counters.of(layer)[1][DEMAND : CAPACITY + 1].zero_()

    def note_repeats(self, expert_ids: Tensor) -> None:
        from .kernels.repeats import launch_count_repeats

        launch_count_repeats(expert_ids, self._troubles, self._told)

    def told(self) -> tuple[int, int, int]:
        told = self._told.tolist()
        return told[OVERFLOW], told[BAD_IDS], told[REPEATS]

    def drop(self) -> Drop | None:
        if not self.is_capturing():
            self._keep_up()
        return _first_drop(self.layers, self._seen)

    def know(self, words: list[list[int]]) -> None:
        self._seen, self._copy = words, None  # one on its way would be older

    def _keep_up(self) -> None:
        """Take the words that have arrived, and now and then send for newer ones."""
        if self._copy is not None and self._copy.has_arrived():
            self._seen, self._copy = self._copy.values(), None
        if self._copy is None and _now() - self._copied_at > _COPY_EVERY_S:
            self._copy, self._copied_at = HostCopy(self.words()), _now()

    def trouble(self) -> Trouble:
        overflows, place, demand, capacity, bad_ids, repeats = self._troubles.tolist()
        return Trouble(overflows, self.layers[place] if overflows else "", demand, capacity, bad_ids, repeats)

    @property
    def layers(self) -> list[str]:
        return self._counters.layers

    def words(self) -> Tensor:
        return self._counters.words()


def open_ledger(alignment: int, num_local_experts: int, device: torch.device) -> HostLedger | DeviceLedger:
    """The ledger of a dispatcher whose rows live on `device`."""
    kind = DeviceLedger if device.type == "cuda" else HostLedger
    with torch.inference_mode(False):  # it outlives the mode of the call that makes it, and is written in every mode
        return kind(alignment, num_local_experts, device)
