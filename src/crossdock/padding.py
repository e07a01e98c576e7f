"""Token counts for backends that cannot take any: padded on the way in, sliced off on the way out.

A backend may want every rank to bring a multiple of its `token_alignment`, or (without `ragged_counts`) all ranks to
bring the same number. `PaddedTransport` stands before such a backend's own transport and adds tokens that go to no
expert. No row of theirs exists, so that what experts receive does not change, and what comes home for them is cut off.

One rank with 5 tokens and one with 3, `token_alignment` 4, no `ragged_counts`: both bring 8. With
`num_tokens_per_rank=10` both bring 12; with `ragged_counts` they bring 8 and 4, and nobody asks anybody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from .backends.base import (
    Backend,
    BackendTraits,
    Call,
    Layout,
    Link,
    NewSize,
    Received,
    Traffic,
    Transport,
    TransportSpec,
    Weights,
)


def open_transport(backend: Backend, spec: TransportSpec, link: Link) -> Transport:
    """Open a backend so that it takes any token counts; its own transport where it does so by itself. Collective."""
    traits = backend.traits
    if traits.ragged_counts and traits.token_alignment == 1:
        return backend.open(spec, link)
    most = _rounded_up(spec.num_max_tokens_per_rank, traits.token_alignment)
    return PaddedTransport(spec, traits, backend.open(replace(spec, num_max_tokens_per_rank=most), link))


class PaddedTransport(Transport):
    """A transport that pads for another one.

    Its layout is two tensors without elements, `[T, 0]` and `[padded T, 0]`, whose shapes tell both numbers without a
    look at the device, and then the other transport's.

    Args:
        spec: of the dispatcher.
        traits: of the backend.
        inner: the backend's transport, whose storage is for `num_max_tokens_per_rank` rounded up.
    """

    def __init__(self, spec: TransportSpec, traits: BackendTraits, inner: Transport) -> None:
        self.spec, self._traits, self._inner = spec, traits, inner

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        num_tokens = x.shape[0]
        num_padded = self._padded(num_tokens, call)
        padded = (_longer(x, num_padded), _longer(scores, num_padded), _longer(expert_ids, num_padded, -1))
        # Entered by whoever knows how many tokens are the caller's.
        received = self._inner.dispatch(*padded, num_rows, call._replace(account=None))
        return received._replace(layout=[*_sizes(x, num_tokens, num_padded), *received.layout])

    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        _, padded, *inner = layout
        return self._inner.rows_out(_longer(x, padded.shape[0]), inner, call)

    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        tokens, _, *inner = layout
        return _shorter(self._inner.scalars_home(values, inner, call), tokens.shape[0])

    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        tokens, padded, *inner = layout
        if weights is not None and self.reads_slot_scores:
            weights = weights._replace(of_slots=_longer(weights.of_slots, padded.shape[0]))
        return _shorter(self._inner.rows_home(rows, weights, inner, call), tokens.shape[0])

    def combine_backward(
        self, grad_out: torch.Tensor, rows: torch.Tensor, row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, padded, *inner = layout
        grad_out = _longer(grad_out, padded.shape[0])
        grad_rows, grad_scores = self._inner.combine_backward(grad_out, rows, row_scores, inner, call)
        return grad_rows, _shorter(grad_scores, tokens.shape[0])

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _, *inner = layout
        dx, grad_scores = self._inner.dispatch_backward(grad_rows, grad_row_scores, inner, call)
        return _shorter(dx, tokens.shape[0]), _shorter(grad_scores, tokens.shape[0])

    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        num_padded = self._aligned(num_tokens) if self._traits.ragged_counts else new_size()
        return [
            *_sizes(like, num_tokens, num_padded),
            *self._inner.fake_layout(num_padded, num_rows, like, new_size),
        ]

    def agree_max(self, value: int, call: Call) -> int:
        return self._inner.agree_max(value, call)

    def input_buffer(self, num_tokens: int) -> torch.Tensor | None:
        return self._inner.input_buffer(num_tokens)

    def fault_flag(self) -> torch.Tensor | None:
        return self._inner.fault_flag()

    def look(self) -> None:
        self._inner.look()

    @property
    def reads_slot_scores(self) -> bool:
        return self._inner.reads_slot_scores

    @property
    def workspace_bytes(self) -> int:
        return self._inner.workspace_bytes

    def abandon(self) -> None:
        self._inner.abandon()

    def sent(self) -> Traffic:
        return self._inner.sent()

    def num_host_syncs(self) -> int:
        return self._inner.num_host_syncs()

    def close(self) -> None:
        self._inner.close()

    def _padded(self, num_tokens: int, call: Call) -> int:
        """Tokens that this rank brings to a dispatch instead of its own `num_tokens`."""
        return int(self._aligned(self._tokens_of(num_tokens, call)))

    def _tokens_of(self, num_tokens: int, call: Call) -> int:
        if self._traits.ragged_counts or call.facts.num_tokens >= 0:  # any number will do, or all have this one
            return num_tokens
        if call.facts.num_tokens_per_rank >= 0:
            return call.facts.num_tokens_per_rank
        if self.spec.row_capacity.kind == "exact":
            return self._inner.agree_max(num_tokens, call)
        return self.spec.num_max_tokens_per_rank

    def _aligned(self, num_tokens: Any) -> Any:  # of integers, symbolic ones too
        return _rounded_up(num_tokens, self._traits.token_alignment)


def _rounded_up(size: Any, multiple: int) -> Any:
    """The next multiple.

    >>> _rounded_up(5, 4), _rounded_up(8, 4), _rounded_up(0, 4)
    (8, 8, 0)
    """
    return (size + multiple - 1) // multiple * multiple


def _longer(tensor: torch.Tensor, length: int, value: float = 0.0) -> torch.Tensor:
    """The tensor with more rows of `value` behind it; itself where it has the length."""
    return tensor if tensor.shape[0] == length else pad(tensor, (0, 0, 0, length - tensor.shape[0]), value=value)


def _shorter(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The first rows as a tensor of their own; itself where it has the length."""
    return tensor if tensor.shape[0] == length else tensor[:length].clone()


def _sizes(like: torch.Tensor, *sizes: int | torch.SymInt) -> list[torch.Tensor]:
    return [like.new_empty((size, 0), dtype=torch.int64) for size in sizes]
