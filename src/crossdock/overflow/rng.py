"""The state of torch's random number generators, for a step that runs again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RngState(NamedTuple):
    """The CPU's generator, and a GPU's where there is one; neither needs the device to read."""

    cpu: Tensor
    device: torch.device
    of_device: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> RngState:
        """The state right now."""
        return cls(torch.get_rng_state(), device, torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            torch.cuda.set_rng_state(self.of_device, self.device)
