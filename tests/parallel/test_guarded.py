"""A guard around the optimizer of a model under FSDP2: what is not applied, put back or run again is sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

import crossdock as cd
from crossdock.testing import PoolRunner, Seat
from tests.conftest import Ranks
from tests.contract.overflow_trials import OPTIMIZERS, assert_same_bits
from tests.parallel.model import Blocks, batch_of, config_of, squares
from tests.parallel.test_sharded import Place, fsdp

NUM_STEPS, NUM_TOKENS = 6, 12
HALF_OF_THE_ROWS = cd.RowCapacity.calibrated(0.5)  # of what the first step needs, so that the second one overflows


class Training:
    """Two blocks under FSDP2, their optimizer, and a step of theirs."""

    def __init__(self, seat: Seat, dispatcher: cd.TokenDispatcher, make: str) -> None:
        self.rank = seat.rank
        self.model, _ = fsdp(Blocks(dispatcher, range(2)), Place(seat, seat.size))
        assert all(isinstance(param, DTensor) for param in self.model.parameters())
        self.optimizer = OPTIMIZERS[make](list(self.model.parameters()))

    def run(self, number: int) -> None:
        """Forward and backward of step `number`."""
        self.optimizer.zero_grad()
        out = self.model(batch_of(NUM_TOKENS, number, self.rank, 1))
        squares(out, batch_of(NUM_TOKENS, number, self.rank, 2)).backward()

    def bits(self) -> dict[str, Tensor]:
        """This rank's part of every parameter and of all that the optimizer keeps of it."""
        parts = {}
        for name, param in self.model.named_parameters():
            parts[name] = own_part(param)
            state = self.optimizer.state.get(param, {})
            parts |= {f"{name}, {key}": own_part(value) for key, value in state.items() if isinstance(value, Tensor)}
        return parts


def own_part(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def under_a_guard(
    seat: Seat, make: str, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], list[int], cd.GuardStats]:
    """What was trained, which steps were left out, and what the guard has done."""
    config = config_of(HALF_OF_THE_ROWS)
    with seat.open(dataclasses.replace(config, on_overflow="skip_step", equal_token_counts=True)) as dispatcher:
        training, skipped = Training(seat, dispatcher, make), list[int]()
        guard = cd.OverflowGuard(dispatcher, training.optimizer, **settings)
        for number in range(NUM_STEPS):
            before = training.bits()
            guard.step(lambda number=number: training.run(number))  # type: ignore[misc]
            if guard.num_skipped() > len(skipped):
                skipped.append(number)
                assert_same_bits(training.bits(), before, f"step {number}")
        return training.bits(), skipped, guard.stats()


def with_room(seat: Seat, make: str, skipped: Sequence[int]) -> dict[str, Tensor]:
    with seat.open(config_of(cd.RowCapacity.worst_case())) as dispatcher:
        training = Training(seat, dispatcher, make)
        for number in range(NUM_STEPS):
            training.run(number)
            if number not in skipped:
                training.optimizer.step()
        return training.bits()


def trained_alike(seat: Seat, make: str, settings: dict[str, Any]) -> tuple[list[int], cd.GuardStats]:
    """Steps that were left out, and what the guard has done; the bits are those of a run that had the room."""
    found, skipped, stats = under_a_guard(seat, make, settings)
    assert_same_bits(found, with_room(seat, make, skipped), "the run that had the room")
    return skipped, stats


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        ("fused AdamW", {}),
        ("AdamW foreach", {}),
        ("AdamW foreach", {"snapshot": True}),
        ("fused AdamW", {"retry": True}),
    ],
    ids=["fused", "host", "snapshot", "retry"],
)
def test_sharded_parameters_are_guarded(ranks: Ranks, make: str, settings: dict[str, Any]):
    (skipped, stats), other = PoolRunner(ranks(2))(trained_alike, make, settings)
    assert (skipped, stats) == other
    assert stats.steps == NUM_STEPS and stats.grown > 0 and len(skipped) == stats.skipped_steps < NUM_STEPS - 1
    assert (stats.skipped_steps == 0) == (stats.retries > 0) == bool(settings.get("retry"))
