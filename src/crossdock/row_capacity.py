"""How many rows a dispatch returns, as arithmetic on integers: the formulas of every `RowCapacity`.

Everything here works on symbolic sizes as well, so that a compiler traces the same formulas that a call evaluates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from .types import DispatcherConfig

Size = int | torch.SymInt

SMALLEST_MULTIPLE = 4
_STEPS = 10**6  # factors are taken to six decimals, rounded up: exact fractions that a compiler's integers can hold


@dataclass(frozen=True)
class Calibration:
    """What a layer's calibrating dispatch measured, the same on every rank.

    Attributes:
        num_rows: rows with padding, of the rank that had most.
        num_tokens_per_rank: of that call.
    """

    num_rows: int
    num_tokens_per_rank: int

    def exceeds(self, other: Calibration) -> bool:
        """Whether it has more rows per token."""
        return self.num_rows * other.num_tokens_per_rank > other.num_rows * self.num_tokens_per_rank


def fitted(config: DispatcherConfig, seen: Calibration) -> Calibration:
    """What to size a `calibrated` layer by, so that it has room for what was `seen` whatever its factor.

    >>> from .types import RowCapacity
    >>> def config(factor):
    ...     return DispatcherConfig(num_experts=4, top_k=3, hidden_dim=8, dtype=torch.float32,
    ...         num_max_tokens_per_rank=64, row_capacity=RowCapacity.calibrated(factor))
    >>> fitted(config(1.5), Calibration(31, 20)), fitted(config(0.5), Calibration(31, 20))
    (Calibration(num_rows=31, num_tokens_per_rank=20), Calibration(num_rows=62, num_tokens_per_rank=20))
    """
    factor = min(_factor_of(config), Fraction(1))
    return Calibration(math.ceil(seen.num_rows / factor), seen.num_tokens_per_rank)


def has_room(config: DispatcherConfig, measured: Calibration, seen: Calibration, share: float = 1.0) -> bool:
    """Whether `share` of a layer's capacity, sized by `measured`, fits what was `seen`; room for padding left aside.

    >>> from .types import RowCapacity
    >>> config = DispatcherConfig(num_experts=4, top_k=3, hidden_dim=8, dtype=torch.float32,
    ...     num_max_tokens_per_rank=64, row_capacity=RowCapacity.calibrated(1.5))
    >>> [has_room(config, Calibration(10, 4), Calibration(rows, 8)) for rows in (30, 31)]
    [True, False]
    """
    there_is = _factor_of(config) * _fraction(share) * measured.num_rows * seen.num_tokens_per_rank
    return seen.num_rows * measured.num_tokens_per_rank <= there_is


def tokens_of_call(config: DispatcherConfig, num_tokens: Size, num_tokens_per_rank: Size) -> Size:
    """The bound of a sync-free call on any rank's tokens; `num_tokens_per_rank` is negative where it was left out."""
    if num_tokens_per_rank >= 0:
        return num_tokens_per_rank
    return num_tokens if config.equal_token_counts else config.num_max_tokens_per_rank


def resolve_num_rows(config: DispatcherConfig, ep_size: int, tokens: Size, measured: Calibration | None = None) -> Size:
    """Rows of a dispatch with at most `tokens` tokens on any rank, for every kind but `exact`.

    `calibrated` needs what was `measured`.

    Two ranks with two experts each, 10 tokens a rank, K = 3:

    >>> from .types import RowCapacity
    >>> def rows(capacity, alignment=1, measured=None, **fields):
    ...     config = DispatcherConfig(num_experts=4, top_k=3, hidden_dim=8, dtype=torch.float32, row_capacity=capacity,
    ...         num_max_tokens_per_rank=64, expert_alignment=alignment, **fields)
    ...     return resolve_num_rows(config, 2, 10, measured)
    >>> rows(RowCapacity.worst_case()), rows(RowCapacity.worst_case(0.5)), rows(RowCapacity.worst_case(), 16)
    (60, 32, 96)
    >>> rows(RowCapacity.worst_case(), distinct_experts=True)  # of 3 slots only 2 can be on one rank
    40
    >>> rows(RowCapacity.balanced(1.1)), rows(RowCapacity.rows(5))
    (36, 5)
    >>> rows(RowCapacity.calibrated(1.5), measured=Calibration(num_rows=31, num_tokens_per_rank=20))
    24
    """
    kind, value = config.row_capacity.kind, config.row_capacity.value
    if kind == "rows":
        assert isinstance(value, int)  # checked by `RowCapacity`
        return value
    assert value is not None and kind != "exact"
    num_local = config.num_experts // ep_size
    if kind == "worst_case":
        slots = min(num_local, config.top_k) if config.distinct_experts else config.top_k
        rows = _times(tokens * ep_size * slots, _fraction(value))
    elif kind == "balanced":
        rows = _times(tokens * config.top_k, _fraction(value))
    else:
        assert measured is not None
        rows = _times(tokens * measured.num_rows, _fraction(value) / measured.num_tokens_per_rank)
    padding = num_local * (config.expert_alignment - 1)
    multiple = max(SMALLEST_MULTIPLE, config.expert_alignment)
    return (rows + padding + multiple - 1) // multiple * multiple


def what_to_change(config: DispatcherConfig, demand: int, capacity: int) -> str:
    """Which setting would have made room for a dispatch that asked for more rows than its capacity."""
    kind, value = config.row_capacity.kind, config.row_capacity.value
    if kind == "rows":
        return f"set row_capacity to rows(n) with n at least {demand}"
    assert value is not None
    needed = math.ceil(value * demand / capacity * 100) / 100
    if kind == "worst_case":
        return f"raise its fraction to at least {min(needed, 1.0):g} (at 1.0 it never overflows)"
    return f"raise its factor to at least {needed:g}"


def _factor_of(config: DispatcherConfig) -> Fraction:
    assert config.row_capacity.value is not None  # of the kinds that have a factor
    return _fraction(config.row_capacity.value)


def _fraction(value: float) -> Fraction:
    """A decimal as it was written, `Fraction(11, 10)` for 1.1, rounded up to six places.

    >>> _fraction(1.1), _fraction(0.0000001)
    (Fraction(11, 10), Fraction(1, 1000000))
    """
    return Fraction(math.ceil(Fraction(repr(float(value))) * _STEPS), _STEPS)


def _times(size: Size, factor: Fraction) -> Size:
    """`size * factor`, rounded up."""
    return (size * factor.numerator + factor.denominator - 1) // factor.denominator
