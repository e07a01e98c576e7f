"""Two pipeline stages, each with its experts over two ranks: the bits of the model in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import crossdock as cd
from crossdock.testing import PoolRunner, Seat, assert_bit_equal
from tests.conftest import Ranks
from tests.parallel.model import (
    CAPACITIES,
    HIDDEN_DIM,
    LENGTHS,
    Blocks,
    batch_of,
    config_of,
    optimizer_of,
    squares,
    sum_in_rank_order,
)

NUM_STAGES, EP_SIZE, NUM_MICRO_BATCHES, BLOCKS_OF_STAGE = 2, 2, 4, 2
CPU = torch.device("cpu")


def length_of(step: int, ep_rank: int) -> int:
    """Tokens of a micro-batch: others at every step, and on every rank of a stage."""
    return LENGTHS[(step + ep_rank) % len(LENGTHS)]


def whole_batch(step: int, ep_rank: int) -> tuple[Tensor, Tensor]:
    """All micro-batches of a step, one behind the other, and their targets."""
    length = NUM_MICRO_BATCHES * length_of(step, ep_rank)
    return batch_of(length, step, ep_rank, 1), batch_of(length, step, ep_rank, 2)


def pipelined(seat: Seat, capacity: cd.RowCapacity) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of every micro-batch (of the last stage) and the weights of this rank's stage after the training."""
    stage_number, ep_rank = divmod(seat.rank, EP_SIZE)
    ep_group = [seat.group((0, 1)), seat.group((2, 3))][stage_number]
    pp_group = [seat.group((0, 2)), seat.group((1, 3))][ep_rank]
    losses: list[Tensor] = []
    with seat.open(config_of(capacity), ep_group) as dispatcher:
        numbers = range(stage_number * BLOCKS_OF_STAGE, (stage_number + 1) * BLOCKS_OF_STAGE)
        model = Blocks(dispatcher, numbers, recomputes=True)
        optimizer = optimizer_of(model)
        for step in range(len(LENGTHS)):
            # A stage keeps to the lengths that it was made for; examples without a gradient get none from the next one.
            length = length_of(step, ep_rank)
            stage = PipelineStage(
                model,
                stage_number,
                NUM_STAGES,
                CPU,
                input_args=torch.empty(length, HIDDEN_DIM, requires_grad=stage_number > 0),
                output_args=torch.empty(length, HIDDEN_DIM, requires_grad=True),
                group=pp_group,
            )
            schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=squares, scale_grads=False)
            x, target = whole_batch(step, ep_rank)
            if stage_number == 0:
                schedule.step(x)
            else:
                of_step: list[Tensor] = []
                schedule.step(target=target, losses=of_step)
                losses += [loss.detach() for loss in of_step]
            finish_step(model, optimizer, ep_group)
    return losses, [parameter.detach() for parameter in model.parameters()]


def in_one_piece(seat: Seat, capacity: cd.RowCapacity) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The same on one pair of ranks, without recomputation: losses, and the weights by stage."""
    losses: list[Tensor] = []
    with seat.open(config_of(capacity)) as dispatcher:
        model = Blocks(dispatcher, range(NUM_STAGES * BLOCKS_OF_STAGE))
        optimizer = optimizer_of(model)
        for step in range(len(LENGTHS)):
            x, target = whole_batch(step, seat.rank)
            for part, wanted in zip(x.chunk(NUM_MICRO_BATCHES), target.chunk(NUM_MICRO_BATCHES), strict=True):
                loss = squares(model(part), wanted)
                loss.backward()
                losses.append(loss.detach())
            finish_step(model, optimizer, seat.group())
    weights = [parameter.detach() for parameter in model.parameters()]
    half = len(weights) // NUM_STAGES
    return losses, [weights[:half], weights[half:]]


def finish_step(model: Blocks, optimizer: torch.optim.Optimizer, ep_group: torch.distributed.ProcessGroup) -> None:
    sum_in_rank_order(model, ep_group)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> list[tuple[list[Tensor], list[list[Tensor]]]]:
    return PoolRunner(ranks(EP_SIZE))(in_one_piece, cd.RowCapacity.exact())


@pytest.mark.parametrize(
    "capacity",
    [CAPACITIES[0], pytest.param(CAPACITIES[1], marks=pytest.mark.full), CAPACITIES[2]],
    ids=str,
)
def test_one_forward_one_backward_has_the_bits_of_one_piece(ranks: Ranks, whole: Any, capacity: cd.RowCapacity):
    by_rank = PoolRunner(ranks(NUM_STAGES * EP_SIZE))(pipelined, capacity)
    for rank, (losses, weights) in enumerate(by_rank):
        stage_number, ep_rank = divmod(rank, EP_SIZE)
        wanted_losses, wanted = whole[ep_rank]
        assert len(losses) == (stage_number == 1) * len(LENGTHS) * NUM_MICRO_BATCHES
        for loss, other in zip(losses, wanted_losses if losses else [], strict=True):
            assert_bit_equal(loss, other, "loss")
        for weight, other in zip(weights, wanted[stage_number], strict=True):
            assert bool(weight.isfinite().all())
            assert_bit_equal(weight, other, f"weight of stage {stage_number} on rank {ep_rank}")
