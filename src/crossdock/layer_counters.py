"""Counters on a device, by layer, in memory that never moves, since graphs have its addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ContractViolation

_LAYERS_PER_PAGE = 128


class LayerCounters:
    """`width` int64 words for every layer that has asked for them, at first zeros.

    Every layer's begin at a multiple of 16 bytes, so that a kernel is compiled once for all of them.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._pages = [self._new_page()]
        self._rows: dict[str, tuple[int, Tensor]] = {}

    def of(self, layer: str) -> tuple[int, Tensor]:
        """A layer's place and its words, `[width]`.

        Raises:
            ContractViolation: it is the first of a new page, which cannot be made inside a capture.
        """
        return self._rows.get(layer) or self._add(layer)

    def __contains__(self, layer: str) -> bool:
        return layer in self._rows

    @property
    def layers(self) -> list[str]:
        """All that have words, by place."""
        return list(self._rows)

    def words(self) -> Tensor:
        """A copy of all of them by place, `[num_layers, width]`."""
        return torch.cat(self._pages)[: len(self._rows), : self._width]

    def zero(self, words: slice) -> None:
        """Begin these words of every layer anew."""
        for page in self._pages:
            page[:, words].zero_()

    def _add(self, layer: str) -> tuple[int, Tensor]:
        place = len(self._rows)
        if place >= _LAYERS_PER_PAGE * len(self._pages):
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ContractViolation(
                    f"layer {layer!r} is the first of more than {place} in this dispatcher and cannot be met inside a"
                    " capture: dispatch once from it before"
                )
            self._pages.append(self._new_page())
        page = self._pages[place // _LAYERS_PER_PAGE]
        self._rows[layer] = place, page[place % _LAYERS_PER_PAGE, : self._width]
        return self._rows[layer]

    def _new_page(self) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode of the call that makes it
            shape = (_LAYERS_PER_PAGE, self._width + self._width % 2)
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
