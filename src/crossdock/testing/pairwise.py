"""Covering arrays: few rows in which every pair of values of any two factors stands together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
_Pair = tuple[str, Hashable, str, Hashable]


def every_pair(factors: Mapping[str, Sequence[Hashable]], covered: Iterable[Row] = ()) -> list[Row]:
    """Rows that contain every pair of values of two factors at least once; the same rows in every run.

    Greedy: a row starts from the first pair still missing and takes, factor by factor, the value that covers most
    missing pairs. Not the fewest rows possible, but near the product of the two longest factors.

    Args:
        factors: the values of every factor, by its name.
        covered: rows that are there already, of the same factors in the same order: their pairs are not missing.

    Example:
        >>> [tuple(row.values()) for row in every_pair({"a": (0, 1), "b": (0, 1), "c": (0, 1)})]
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]

    """
    missing = dict.fromkeys(_all_pairs(factors))
    for row in covered:
        _strike(missing, row)
    rows: list[Row] = []
    while missing:
        name, value, other, other_value = next(iter(missing))
        row = {name: value, other: other_value}
        for factor in factors:
            if factor not in row:
                row[factor] = _best(factor, factors[factor], row, missing, turn=len(rows))
        row = {factor: row[factor] for factor in factors}
        _strike(missing, row)
        rows.append(row)
    return rows


def _all_pairs(factors: Mapping[str, Sequence[Hashable]]) -> list[_Pair]:
    return [(a, x, b, y) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]


def _strike(missing: dict[_Pair, None], row: Row) -> None:
    for pair in _pairs_of(row):
        missing.pop(pair, None)


def _pairs_of(row: Row) -> list[_Pair]:
    return [(a, row[a], b, row[b]) for a, b in combinations(row, 2)]


def _best(factor: str, values: Sequence[Hashable], row: Row, missing: dict[_Pair, None], turn: int) -> Hashable:
    """Return the value that covers most; of equals the next in turn, so that all values come about equally often."""

    def gain(value: Hashable) -> int:
        return sum(
            (other, row[other], factor, value) in missing or (factor, value, other, row[other]) in missing
            for other in row
        )

    in_turn = [values[(turn + i) % len(values)] for i in range(len(values))]
    return max(in_turn, key=gain)
