"""What every rank must agree on in one call, as the fixed-size words that open every operation.

The words travel first (or, on transports where a wrong size is harmless, beside the rows), so ranks that disagree learn
of it at once, all of them, with the differing values in the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import ContractViolation

OPERATIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward", "redispatch", "step")
_LAYERS_REMEMBERED = 4096
LAYER_NAME_WORDS = 6
NUM_WORDS = 9 + LAYER_NAME_WORDS


class CallFacts(NamedTuple):
    """One operation as a rank understands it.

    Attributes:
        number: how many operations were finished before this one; -1 is the opening.
        operation: one of `OPERATIONS`.
        layer: name of the layer view; of a guard's "step", which one it is.
        num_tokens_per_rank: the caller's bound; -1 where it was left out or does not apply.
        num_tokens: T of this rank; -1 unless equal counts were declared.
        grad_mode: whether a backward will follow.
        apply_scores: whether combine multiplies by the scores.
        dispatch_number: number of the dispatch whose rows this moves; -1 in dispatch itself.
        num_rows: rows that a dispatch is sized to; -1 where it waits for the count, or does not apply.
    """

    number: int
    operation: str
    layer: str
    num_tokens_per_rank: int = -1
    num_tokens: int = -1
    grad_mode: bool = False
    apply_scores: bool = True
    dispatch_number: int = -1
    num_rows: int = -1

    def __str__(self) -> str:
        if self.number < 0:
            return "the opening of an overflow guard" if self.operation == "step" else "the opening of a dispatcher"
        if self.operation == "step":
            return in_words(self.operation, self.layer, self.number)
        return f"call {self.number} ({self.operation} of layer {self.layer!r})"

    def words(self) -> tuple[int, ...]:
        """`NUM_WORDS` int64 values, readable on the other side (of the layer's name the last 48 bytes)."""
        return (
            self.number,
            OPERATIONS.index(self.operation),
            self.num_tokens_per_rank,
            self.num_tokens,
            int(self.grad_mode),
            int(self.apply_scores),
            self.dispatch_number,
            self.num_rows,
            *_words_of_name(self.layer),
        )


def in_words(operation: str, layer: str, number: int | None = None) -> str:
    """What a rank does or did last; a call that has no number yet without one.

    >>> in_words("combine", "moe", 3), in_words("combine", "moe"), in_words("step", "7", 9)
    ("combine of layer 'moe' (call 3)", "combine of layer 'moe'", 'step 7 of an overflow guard')
    """
    if operation == "step":
        return f"step {layer} of an overflow guard"
    return f"{operation} of layer {layer!r}" + ("" if number is None else f" (call {number})")


@lru_cache(maxsize=_LAYERS_REMEMBERED)
def _words_of_name(layer: str) -> tuple[int, ...]:
    """A digest of the name, and its last letters."""
    name = layer.encode()
    digest = int.from_bytes(hashlib.sha256(name).digest()[:7], "little")
    cut = name[-8 * LAYER_NAME_WORDS :].ljust(8 * LAYER_NAME_WORDS, b"\0")
    return digest, *(int.from_bytes(cut[i : i + 8], "little", signed=True) for i in range(0, len(cut), 8))


def _layer_name(words: Sequence[int]) -> str:
    letters = b"".join(
        int(w).to_bytes(8, "little", signed=True) for w in words[NUM_WORDS - LAYER_NAME_WORDS : NUM_WORDS]
    )
    return repr(letters.rstrip(b"\0").decode(errors="replace"))


_FIELDS: tuple[tuple[str, Callable[[Sequence[int]], object]], ...] = (
    ("call number", lambda w: w[0]),
    ("operation", lambda w: OPERATIONS[w[1]] if 0 <= w[1] < len(OPERATIONS) else f"unknown ({w[1]})"),
    ("layer", _layer_name),
    ("num_tokens_per_rank", lambda w: "left out" if w[2] < 0 else w[2]),
    ("number of tokens (declared equal by equal_token_counts=True)", lambda w: w[3]),
    ("grad mode", lambda w: "enabled" if w[4] else "disabled"),
    ("apply_scores", lambda w: bool(w[5])),
    ("the dispatch whose handle is used", lambda w: f"call {w[6]}" if w[6] >= 0 else "none"),
    ("row capacity of this call", lambda w: f"{w[7]} rows" if w[7] >= 0 else "exact"),
)


def compare(by_rank: Sequence[Sequence[int]]) -> None:
    """Raise unless every rank's words are the same.

    Raises:
        ContractViolation: with the differing values by rank; `ranks` are those outside the largest agreeing set (of
            equally large ones, the set of the lowest rank counts as right).
    """
    words = [tuple(int(w) for w in rank_words[:NUM_WORDS]) for rank_words in by_rank]
    if len(set(words)) == 1:
        return
    agreed = _largest_agreeing(dict(enumerate(words)))
    reference = words[agreed[0]]
    odd = [rank for rank in range(len(words)) if rank not in agreed]
    differing = [(name, read) for name, read in _FIELDS if len({read(w) for w in words}) > 1]
    if any(name == "operation" for name, _ in differing):  # then most of the rest differs too, and tells nothing
        differing = [(name, read) for name, read in differing if name in ("call number", "operation", "layer")]
    differences = "; ".join(_difference(name, read, words) for name, read in differing)
    raise ContractViolation(
        f"ranks {odd} made another call than ranks {agreed}, which are at call {reference[0]}"
        f" ({OPERATIONS[reference[1]]} of layer {_layer_name(reference)}): {differences or 'layer names differ'}",
        odd,
    )


def odd_ranks(value_of_rank: Mapping[int, Hashable]) -> list[int]:
    """Ranks outside the largest agreeing set; of equally large ones, the set of the lowest rank counts as right.

    >>> odd_ranks({0: "a", 1: "b", 2: "b"}), odd_ranks({0: "a", 1: "b"}), odd_ranks({})
    ([0], [1], [])
    """
    agreed = _largest_agreeing(value_of_rank)
    return [rank for rank in sorted(value_of_rank) if rank not in agreed]


def _largest_agreeing(value_of_rank: Mapping[int, Hashable]) -> list[int]:
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, value in sorted(value_of_rank.items()):
        ranks_of.setdefault(value, []).append(rank)
    return max(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]), default=[])


def _difference(name: str, read: Callable[[Sequence[int]], object], words: Sequence[Sequence[int]]) -> str:
    ranks_of: dict[object, list[int]] = {}
    for rank, rank_words in enumerate(words):
        ranks_of.setdefault(read(rank_words), []).append(rank)
    return f"{name} is " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items())
