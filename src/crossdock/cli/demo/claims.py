"""What the demo shows: one claim a line, with how it was shown and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossdock.testing import assert_bit_equal

from ..output import counted
from .layers import LayerLine
from .parallel import gathered_texts


@dataclass(frozen=True)
class Claim:
    """One thing that was shown, or was not.

    Attributes:
        claim: what should hold.
        how: how it was tried.
        holds: whether it did.
        result: what was found: counts, or the first difference.
        layers: what the layers did meanwhile, where that is told.
    """

    claim: str
    how: str
    holds: bool
    result: str
    layers: tuple[LayerLine, ...] = ()


class Comparison:
    """Collects, on one rank, pairs of tensors that should have the same bits."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self.num_elements = 0
        self.differences: list[str] = []

    def add(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """Compare one pair; `what` names it in the first difference."""
        self.num_tensors += 1
        self.num_elements += expected.numel()
        try:
            assert_bit_equal(actual, expected, what)
        except AssertionError as difference:
            self.differences.append(str(difference))

    def add_all(self, where: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare tensors of the same name."""
        for name in expected:
            self.add(f"{where} {name}", actual[name], expected[name])

    def claim(self, claim: str, how: str, group: Any = None) -> Claim:
        """What all ranks found together; every rank takes part, and all get the same answer."""
        first = self.differences[0] if self.differences else ""
        mine = f"{self.num_tensors} {self.num_elements} {len(self.differences)} {first}"
        found = [text.split(" ", 3) for text in gathered_texts(mine, group)]
        num_tensors, num_elements, num_different = (sum(int(text[i]) for text in found) for i in range(3))
        if num_different:
            rank, difference = next((rank, text[3]) for rank, text in enumerate(found) if int(text[2]))
            result = f"{num_different} of {num_tensors} tensors differ; the first, on rank {rank}: {difference}"
        else:
            result = f"{num_tensors:,} tensors, {num_elements:,} elements: the same bits"
        return Claim(claim, how, num_different == 0, result)


def on_ranks(num_ranks: int, device: torch.device) -> str:
    """Where something was shown, in words."""
    return counted(num_ranks, "GPU" if device.type == "cuda" else "CPU rank")
