"""The MoE layer in capacity mode under DDP and FSDP2: dense weights over all ranks, experts over EP and what is left.

Two ranks add up two numbers, in whatever order: DDP and FSDP2 on two ranks, and FSDP2 over a mesh of two by two, have
the bits of gradients that are gathered and added by hand. Four ranks that add in another order than that keep to the
baseline rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import crossdock as cd
from crossdock import recompute
from crossdock.testing import PoolRunner, Seat, assert_bit_equal, assert_within_baseline
from tests.conftest import Ranks
from tests.parallel.model import LENGTHS, Blocks, batch_of, config_of, optimizer_of, squares

NUM_BLOCKS = 2
CAPACITIES = (cd.RowCapacity.worst_case(), cd.RowCapacity.calibrated(3.0))
EXACT = cd.RowCapacity.exact()
Gradients = Callable[[], None]  # what is left to do once backward has run


class Place:
    """Where a rank stands: experts over `ep_size` neighbours, and `dp_size` groups of such."""

    def __init__(self, seat: Seat, ep_size: int) -> None:
        self.seat, self.ep_size, self.dp_size = seat, ep_size, seat.size // ep_size
        groups = [range(first, first + ep_size) for first in range(0, seat.size, ep_size)]
        self.ep_group = [seat.group(tuple(ranks)) for ranks in groups][seat.rank // ep_size]
        across = [range(first, seat.size, ep_size) for first in range(ep_size)]
        self.dp_group = [seat.group(tuple(ranks)) for ranks in across][seat.rank % ep_size]

    def mesh(self) -> DeviceMesh:
        """`[dp, ep]`."""
        return init_device_mesh("cpu", (self.dp_size, self.ep_size), mesh_dim_names=("dp", "ep"))


# -- ways to share the work: the model to call, and what to do with gradients ----------------------------------------


def by_hand(model: Blocks, place: Place) -> tuple[nn.Module, Gradients]:
    """Gradients are gathered and added: within the EP group in rank order, then over the groups in theirs."""

    def add_up() -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            groups = (place.dp_group,) if ".experts." in name else (place.ep_group, place.dp_group)
            for group in groups:
                total, *others = gathered(parameter.grad, group)
                for other in others:
                    total += other
                parameter.grad.copy_(total)
            parameter.grad /= place.seat.size

    return model, add_up


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    return parts


def ddp(model: Blocks, place: Place) -> tuple[nn.Module, Gradients]:
    """Experts are replicated over the groups, all else over all ranks."""
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)

    def add_up() -> None:
        for name, parameter in model.named_parameters():
            if name in experts:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=place.dp_group)
                parameter.grad.div_(place.seat.size)

    return DistributedDataParallel(model), add_up


def fsdp(model: Blocks, place: Place, *, recomputes: bool = False, flat: bool = False) -> tuple[nn.Module, Gradients]:
    """Experts are sharded over the groups, all else over all ranks, or (not `flat`) over EP and then replicated."""
    mesh = place.mesh()
    whole = init_device_mesh("cpu", (place.seat.size,)) if flat or place.dp_size == 1 else mesh
    for number, block in enumerate(model.blocks):
        experts: Any = block.get_submodule("moe.experts")
        fully_shard(experts, mesh=mesh["dp"])
        experts.set_gradient_divide_factor(place.seat.size)  # as all others: the loss is a mean over ranks
        if place.dp_size > 1:  # torch divides twice where there is nothing to add
            experts.set_force_sum_reduction_for_comms(True)  # Gloo cannot divide on the way
        if recomputes:
            model.blocks[number] = checkpoint_wrapper(block, context_fn=recompute.context_fn)
        fully_shard(model.blocks[number], mesh=whole)
    fully_shard(model, mesh=whole)
    return model, lambda: None


def fsdp_with_recomputation(model: Blocks, place: Place) -> tuple[nn.Module, Gradients]:
    return fsdp(model, place, recomputes=True)


def flat_fsdp(model: Blocks, place: Place) -> tuple[nn.Module, Gradients]:
    return fsdp(model, place, flat=True)


WAYS: dict[str, Callable[[Blocks, Place], tuple[nn.Module, Gradients]]] = {
    "by hand": by_hand,
    "DDP": ddp,
    "FSDP2": fsdp,
    "FSDP2, recomputation": fsdp_with_recomputation,
    "FSDP2, flat": flat_fsdp,
}


# -- a training --------------------------------------------------------------------------------------------------


def train(seat: Seat, way: str, ep_size: int, capacity: cd.RowCapacity, num_steps: int) -> dict[str, list[Tensor]]:
    """The losses of this rank, the gradients of the first step, and the weights at the end, whole."""
    place = Place(seat, ep_size)
    seen: dict[str, list[Tensor]] = {"loss": [], "first gradient": [], "weight": []}
    with seat.open(config_of(capacity), place.ep_group) as dispatcher:
        model = Blocks(dispatcher, range(NUM_BLOCKS))
        called, finish = WAYS[way](model, place)
        optimizer = optimizer_of(model)
        for step in range(num_steps):
            length = LENGTHS[(step + seat.rank) % len(LENGTHS)]
            loss = squares(called(batch_of(length, step, seat.rank, 1)), batch_of(length, step, seat.rank, 2))
            loss.backward()
            finish()
            seen["loss"].append(loss.detach())
            if step == 0:
                seen["first gradient"] = [whole(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        seen["weight"] = [whole(parameter.detach()) for parameter in model.parameters()]
    return seen


def whole(tensor: Any) -> Tensor:
    entire: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return entire.detach().clone()


def own_gradients(seat: Seat, ep_size: int) -> list[Tensor]:
    """Gradients of the first step before they are added up, and in the order of `Blocks.parameters`."""
    with seat.open(config_of(), Place(seat, ep_size).ep_group) as dispatcher:
        model = Blocks(dispatcher, range(NUM_BLOCKS))
        length = LENGTHS[seat.rank % len(LENGTHS)]
        squares(model(batch_of(length, 0, seat.rank, 1)), batch_of(length, 0, seat.rank, 2)).backward()
        return [whole(parameter.grad) for parameter in model.parameters()]


@pytest.fixture(scope="module")
def trained_by_hand(ranks: Ranks) -> Callable[..., list[dict[str, list[Tensor]]]]:
    """What others are compared with, by number of ranks, EP size and steps; each made once."""
    return cache(
        lambda num_ranks, ep_size, steps: PoolRunner(ranks(num_ranks))(train, "by hand", ep_size, EXACT, steps)
    )


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [(2, "DDP"), (2, "FSDP2"), (2, "FSDP2, recomputation"), (4, "FSDP2"), (4, "FSDP2, recomputation")],
)
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
def test_training_has_the_bits_of_gradients_added_by_hand(
    ranks: Ranks, trained_by_hand: Any, num_ranks: int, way: str, capacity: cd.RowCapacity
):
    wanted, actual = trained_by_hand(num_ranks, 2, 10), PoolRunner(ranks(num_ranks))(train, way, 2, capacity, 10)
    for rank, (expected, seen) in enumerate(zip(wanted, actual, strict=True)):
        for name in expected:
            for number, (one, other) in enumerate(zip(seen[name], expected[name], strict=True)):
                assert bool(one.isfinite().all())
                assert_bit_equal(one, other, f"{name} {number} on rank {rank}")


@pytest.mark.parametrize("way", ["DDP", "FSDP2, flat"])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_four_ranks_that_add_in_their_own_order_lose_no_more_than_ours(
    ranks: Ranks, trained_by_hand: Any, way: str, ep_size: int
):
    run = PoolRunner(ranks(4))
    baseline, parts = trained_by_hand(4, ep_size, 1), run(own_gradients, ep_size)
    actual = run(train, way, ep_size, CAPACITIES[0], 10)
    for rank, seen in enumerate(actual):
        assert all(bool(tensor.isfinite().all()) for name in seen for tensor in seen[name])
        assert_bit_equal(seen["loss"][0], baseline[rank]["loss"][0], "first loss")
        for number, gradient in enumerate(seen["first gradient"]):
            same_shape = [parts[other][number].double() for other in who_adds(rank, ep_size, number)]
            truth = torch.stack(same_shape).sum(0) / 4
            plain = baseline[rank]["first gradient"][number]
            assert_within_baseline(gradient, truth, plain, what=f"first gradient {number} on rank {rank}")


def who_adds(rank: int, ep_size: int, number: int) -> range:
    """The ranks whose gradients of a parameter add up on this one: for experts, the holders of the same ones."""
    is_expert = number % 6 >= 3  # of a block's six: dense weight and bias, router, and three of the experts
    return range(rank % ep_size, 4, ep_size) if is_expert else range(4)
