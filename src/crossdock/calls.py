"""The calls of one layer: what is checked before them, what autograd is given, and what goes into a handle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import autograd
from .eager import is_plain_call
from .errors import ContractViolation
from .inputs import check_before_casting, check_combine, check_is_handle
from .names import decode_name
from .opened import OpenDispatcher
from .recompute.frames import count_dispatch
from .types import Dispatched, DispatchHandle


class LayerCalls:
    """Of the layer with this encoded name, on an opened dispatcher."""

    def __init__(self, opened: OpenDispatcher, encoded_name: Tensor) -> None:
        self._open, self._encoded_name = opened, encoded_name

    @property
    def name(self) -> str:
        """The layer's name."""
        return decode_name(self._encoded_name)

    def recalibrate(self) -> None:
        """Let this layer measure its next eager dispatch anew (`row_capacity` calibrated); on all ranks alike.

        Raises the dispatcher's first fault, which no other size mends.
        """
        self._open.session.raise_fault()
        self._open.sizes.forget(self.name)

    def dispatch(
        self,
        x: Tensor,
        topk_scores: Tensor,
        topk_expert_ids: Tensor,
        num_local_tokens_per_expert: Tensor | None = None,
        *,
        num_tokens_per_rank: int | None = None,
    ) -> Dispatched:
        """Send every token's row to the experts it names.

        Args:
            x: `[T, hidden_dim]` of the configured dtype; T may be 0 and may differ between ranks.
            topk_scores: `[T, top_k]` float32; other float dtypes are cast.
            topk_expert_ids: `[T, top_k]` int32 or int64 global ids; -1 is no expert, and a repeated id counts each
                time.
            num_local_tokens_per_expert: `[num_experts]`, this rank's histogram of the ids, where the caller has it: a
                cross-check under `exact` (of its shape alone on a GPU), ignored otherwise.
            num_tokens_per_rank: this call's bound on T, the same on every rank. Left out, the group agrees by itself
                under `exact`; the sync-free capacities take T where `equal_token_counts=True` declares it to be
                everyone's, and else `num_max_tokens_per_rank`.

        Raises:
            InvalidInput: before any communication.
            CapacityOverflow: an earlier dispatch has dropped rows, under `on_overflow="raise"`.
            ContractViolation, PeerTimeout: ranks that differ, or are missing.
        """
        check_before_casting(self._open.config, x, topk_scores, topk_expert_ids, num_tokens_per_rank)
        scores = self._scores_to_keep(topk_scores)
        bound = -1 if num_tokens_per_rank is None else num_tokens_per_rank
        count_dispatch(self._open.key, self)
        rows, row_scores, counts, offsets, kept_scores, number, rows_end, *layout = autograd.call_dispatch(
            x,
            scores,
            topk_expert_ids,
            num_local_tokens_per_expert,
            self._anchor(),
            self._open.key,
            self._encoded_name,
            bound,
        )
        handle = DispatchHandle(
            encoded_layer=self._encoded_name,
            num_tokens=x.shape[0],
            num_rows=rows.shape[0],
            topk_scores=scores,
            row_scores=kept_scores,
            rows_end=rows_end,
            dispatch_number=number,
            dispatcher_key=self._open.key,
            layout=tuple(layout),
        )
        return Dispatched(rows=rows, tokens_per_expert=counts, expert_offsets=offsets, scores=row_scores, handle=handle)

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """Bring the experts' rows home: `[T, hidden_dim]`, every token's rows added up in the order of its slots.

        Args:
            rows: `[R, hidden_dim]`, in the order in which they were dispatched.
            handle: of that dispatch; may be combined again, and in any order with others.
            apply_scores: multiply every row by its slot's score; False where the experts did.

        Raises:
            InvalidInput: before any communication.
            ContractViolation, PeerTimeout: ranks that differ, or are missing.
        """
        check_combine(self._open.config, self._open.key, rows, handle, apply_scores)
        out = autograd.call_combine(
            rows,
            handle.topk_scores,
            handle.row_scores,
            handle.rows_end,
            handle.dispatch_number,
            handle.layout,
            self._anchor(),
            self._open.key,
            self._encoded_name,
            apply_scores,
        )
        if not torch.compiler.is_compiling() and out.grad_fn is not None:
            self._open.note_combined(handle, out.grad_fn)
        return out

    def join_backward(self, handle: DispatchHandle) -> None:
        """Take part in the backward of a combine whose output this rank's loss leaves out, with a gradient of zero.

        Call it where the other ranks call `backward()`. The experts of this rank get the gradients of the other ranks'
        tokens, as they would in a backward of its own. It is the whole backward of that output: where this rank has a
        loss over the same graph, add `0 * out.sum()` to that loss instead.

        Raises:
            ContractViolation: the handle was not combined in grad mode here, or its backward has already run.
            InvalidInput: anything but a handle.
        """
        check_is_handle("join_backward", handle)
        nodes = self._open.take_combined(handle)
        if not nodes:
            raise ContractViolation(
                f"join_backward found no backward left for this handle (layer {handle.layer!r}): it was not combined in"
                " grad mode, its output was dropped with its graph, or it was compiled (then add 0 * out.sum() to the"
                " loss)"
            )
        config = self._open.config
        zero = handle.row_scores.new_zeros((handle.num_tokens, config.hidden_dim), dtype=config.dtype)
        _backward_from(nodes, zero)

    def _scores_to_keep(self, topk_scores: Tensor) -> Tensor:
        """As float32, for a handle: a copy, since the caller may write to its tensor, unless nobody reads it then.

        Else a tensor of its own over the same memory, so that the caller's may get another shape or a history; a copy
        again where it would keep more memory alive than it shows.
        """
        if topk_scores.dtype != torch.float32:
            return topk_scores.to(torch.float32)
        is_read = torch.is_grad_enabled() or self._open.transport.reads_slot_scores
        if is_read or not is_plain_call(topk_scores) or topk_scores.untyped_storage().nbytes() > topk_scores.nbytes:
            return topk_scores.clone()
        return topk_scores.detach()

    def _anchor(self) -> Tensor | None:
        return self._open.anchor if torch.is_grad_enabled() else None


def _backward_from(nodes: list[Any], grad: Tensor) -> None:
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in nodes]
    try:
        torch.autograd.backward(edges, [grad] * len(edges))
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ContractViolation("join_backward came late: the backward of this combine has already run here") from error
