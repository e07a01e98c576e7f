"""Layouts that two ranks hold differently: both say so, with the pair and its numbers, before any row moves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock.backends.wire_layout import WireLayout
from crossdock.testing import Seat
from tests.contract.conftest import On
from tests.contract.trials import make_config, refused

# Rank 0 keeps one token and has three for rank 1, which keeps one and has two for it.
IDS = ([[0], [2], [3], [2]], [[1], [0], [3]])
CHANGES = {
    "swapped": lambda splits: splits.flip(1),
    "one row more": lambda splits: splits + 1,
    "nothing": lambda splits: splits * 0,
    "slots alone": lambda splits: splits + torch.tensor([[0], [0], [1], [0]]),
}
# `symmetric` exchanges no sizes: every rank works out all of them from what all ranks have published.
on_a_wire = pytest.mark.parametrize("backend", ["loopback", "all_to_all"])


def inputs(seat: Seat) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor(IDS[seat.rank])
    return torch.ones(len(ids), 16, requires_grad=True), torch.ones(len(ids), 1), ids


def combined_after(seat: Seat, reduction: str, change: str) -> list[str]:
    """What combine says once rank 1's handle has been written to, and what the next call says."""
    with seat.open(make_config(4, 1, reduction=reduction)) as dispatcher:
        routed = dispatcher.dispatch(*inputs(seat))
        if seat.rank == 1:
            splits = WireLayout(*routed.handle.layout).splits
            splits.copy_(CHANGES[change](splits))
        told = refused(lambda: dispatcher.combine(routed.rows, routed.handle), cd.ContractViolation)
        return [told, refused(lambda: dispatcher.dispatch(*inputs(seat)), cd.ContractViolation)]


@on_a_wire
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_handle_that_was_written_to(on: On, backend: str, reduction: str, change: str):
    told = on(backend, 2)(combined_after, reduction, change)
    begin = "ranks [0, 1] hold layouts that do not fit each other in call 1 (combine of layer ''):"
    assert told[0][0].startswith(f"{begin} rank 0 has 3 token rows (3 slots) for rank 1 and 2 (2) from it")
    assert told[1][0].startswith(f"{begin} rank 1 has ")
    for first, later in told:
        assert first == later


def went_back_after(seat: Seat, change: str) -> str:
    """What a backward says where a hook of rank 1 does not bring saved integers back as they were."""

    def unpack(saved: Tensor) -> Tensor:
        return CHANGES[change](saved) if saved.shape == (4, 2) and saved.dtype is torch.int64 else saved

    hooks: AbstractContextManager[Any] = nullcontext()
    if seat.rank == 1:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)
    with seat.open(make_config(4, 1)) as dispatcher:
        with hooks:
            routed = dispatcher.dispatch(*inputs(seat))
            out = dispatcher.combine(routed.rows, routed.handle)
        return refused(out.sum().backward, cd.ContractViolation)


@on_a_wire
def test_what_autograd_saved_was_changed(on: On, backend: str):
    for told in on(backend, 2)(went_back_after, "swapped"):
        assert told.startswith("ranks [0, 1] hold layouts that do not fit each other in call 2 (combine_backward of")
