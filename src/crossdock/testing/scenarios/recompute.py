"""Activation checkpointing: the recomputation moves rows along the layout of the forward, and waits for nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ...recompute import checkpoint
from ...types import Dispatched, DispatchLayer
from ..compare import assert_bit_equal
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat


class _Region:
    """A checkpointed region around one layer; keeps what its dispatches gave."""

    def __init__(self, layer: DispatchLayer, ids: Tensor) -> None:
        self._layer, self._ids = layer, ids
        self.routed: list[Dispatched] = []

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        routed = self._layer.dispatch(x, scores, self._ids)
        self.routed.append(routed)
        rows = (routed.rows * routed.rows).masked_fill(~routed.row_valid.unsqueeze(1), float("nan"))
        return self._layer.combine(rows, routed.handle)


def _regions(layer: DispatchLayer, problem: Problem, seat: Seat) -> tuple[_Region, _Region]:
    """Two regions that use one layer with different routings: the second names the expert behind every one."""
    ids = problem.topk_expert_ids[seat.rank].to(seat.device)
    return _Region(layer, ids), _Region(layer, (ids + 1) % problem.config.num_experts)


def _leaves(problem: Problem, seat: Seat) -> tuple[Tensor, Tensor]:
    x, scores = (part[seat.rank].to(seat.device, copy=True) for part in (problem.x, problem.topk_scores))
    return x.requires_grad_(), scores.requires_grad_()


def replays(seat: Seat) -> None:
    """Both kinds of checkpointing: the same rows and gradients as without, and no host synchronisation in backward.

    Backward comes to the second region first, and to the first when another layout than its own was the latest.
    """
    problem = seat.problem("skewed", alignment=16)
    with seat.open(problem.config) as dispatcher:
        layer = dispatcher.layer("checkpointed")
        expected, (first, second) = _leaves(problem, seat), _regions(layer, problem, seat)
        second(first(*expected), expected[1]).sum().backward()
        for kind, use_reentrant in {"non-reentrant": False, "reentrant": True}.items():
            (first, second), (x, scores) = _regions(layer, problem, seat), _leaves(problem, seat)
            between = checkpoint(first, x, scores, use_reentrant=use_reentrant)
            out = checkpoint(second, between, scores, use_reentrant=use_reentrant)
            host_syncs = dispatcher.stats().host_syncs
            out.sum().backward()
            assert dispatcher.stats().host_syncs == host_syncs, f"{kind} recomputation waited for the host"
            for region in (first, second):
                forward, again = region.routed
                _assert_same_dispatch(forward, again, kind)
            for name, leaf, wanted in zip(("x", "scores"), (x, scores), expected, strict=True):
                assert leaf.grad is not None and wanted.grad is not None
                assert_bit_equal(leaf.grad, wanted.grad, f"gradient of {name}, {kind} checkpointing")


def _assert_same_dispatch(forward: Dispatched, again: Dispatched, kind: str) -> None:
    assert forward.rows.shape == again.rows.shape, f"{kind} recomputation has rows {list(again.rows.shape)}"
    assert_bit_equal(again.tokens_per_expert, forward.tokens_per_expert, f"recomputed counts, {kind}")
    assert_bit_equal(again.expert_offsets, forward.expert_offsets, f"recomputed offsets, {kind}")
    end = int(forward.expert_offsets[-1])
    with torch.no_grad():
        assert_bit_equal(again.rows[:end], forward.rows[:end], f"recomputed rows, {kind}")
        assert_bit_equal(again.scores[:end], forward.scores[:end], f"recomputed scores, {kind}")


SCENARIOS = (Scenario("autograd", "activation checkpointing replays the layout", replays),)
