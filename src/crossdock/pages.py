"""Words of a device by layer, in memory that never moves, since graphs have its addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ContractViolation

_LAYERS_PER_PAGE = 128


class LayerPages:
    """A row of `width` int64 words for every layer that has asked for one, at first zeros.

    All rows begin at multiples of 16 bytes, so that a kernel is compiled once for all of them.

    Attributes:
        pages: `[128, width or one more]` each: the rows, and such as nobody has asked for yet.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self.pages = [self._new_page()]
        self._rows: dict[str, tuple[int, Tensor]] = {}

    def row(self, layer: str) -> tuple[int, Tensor]:
        """A layer's place and its row, `[width]`.

        Raises:
            ContractViolation: it is the first of a new page, which cannot be made inside a capture.
        """
        return self._rows.get(layer) or self._add(layer)

    @property
    def layers(self) -> list[str]:
        """All that have a row, by place."""
        return list(self._rows)

    def words(self) -> Tensor:
        """A copy of all rows by place, `[num_layers, width]`."""
        return torch.cat(self.pages)[: len(self._rows), : self._width]

    def _add(self, layer: str) -> tuple[int, Tensor]:
        place = len(self._rows)
        if place >= _LAYERS_PER_PAGE * len(self.pages):
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ContractViolation(
                    f"layer {layer!r} is the first of more than {place} in this dispatcher and cannot be met inside a"
                    " capture: dispatch once from it before"
                )
            self.pages.append(self._new_page())
        page = self.pages[place // _LAYERS_PER_PAGE]
        self._rows[layer] = place, page[place % _LAYERS_PER_PAGE, : self._width]
        return self._rows[layer]

    def _new_page(self) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode of the call that makes it
            shape = (_LAYERS_PER_PAGE, self._width + self._width % 2)
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
