"""Where the device writes down what a dispatch asked for and got (see `tally.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Account(NamedTuple):
    """Of one layer of a dispatcher's ledger.

    Attributes:
        words: `[9 + e]` int64: what the layer's dispatches asked for and got.
        troubles: `[6]` int64: what has gone wrong on any layer.
        told: `[6]` int64 that the host can read: the same, as far as something is wrong.
        overflowed: `[1]` float32: 1 once rows were dropped, unless the policy is to count only.
        layer: the layer's place in the ledger.
        policy: of an overflow: 0 counts, 1 flags as well, 2 raises as well.
    """

    words: torch.Tensor
    troubles: torch.Tensor
    told: torch.Tensor
    overflowed: torch.Tensor
    layer: int
    policy: int

    @property
    def books(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return self.words, self.troubles, self.told, self.overflowed
