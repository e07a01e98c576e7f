"""A small model that trains under a guard; of its batches some fit the capacity of the first one and some do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import crossdock as cd
from crossdock.testing import Seat
from tests.contract.tails import SpoilingExperts
from tests.contract.trials import make_config

NUM_EXPERTS, TOP_K, NUM_TOKENS, HIDDEN_DIM = 4, 2, 8, 16
CALIBRATED = cd.RowCapacity.calibrated(1.0)
ROOM = cd.RowCapacity.worst_case()

# By name, as arguments of tests travel to other processes.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}


def guarded_config(**fields: Any) -> cd.DispatcherConfig:
    known: dict[str, Any] = {"row_capacity": CALIBRATED, "on_overflow": "skip_step", "equal_token_counts": True}
    return make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, **(known | fields))


class Model(nn.Module):
    """Layers of experts over one dispatcher; routing is given, scores are learnt. Whoever reads a tail learns NaN."""

    def __init__(self, dispatcher: cd.TokenDispatcher, *, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = [dispatcher.layer(f"moe {i}") for i in range(num_layers)]
        generator = torch.Generator().manual_seed(5)
        self.router = nn.Parameter(torch.randn(HIDDEN_DIM, NUM_EXPERTS, generator=generator) * 0.1)
        first = dispatcher.ep_rank * dispatcher.num_local_experts
        self.experts = nn.ModuleList(
            SpoilingExperts(dispatcher.num_local_experts, HIDDEN_DIM, 8, seed=i, first_expert_id=first)
            for i in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        """`ids` of all layers, or of each."""
        for layer, experts, chosen in zip(self.layers, self.experts, cycle(ids), strict=False):
            scores = torch.sigmoid(x @ self.router).gather(1, chosen)
            routed = layer.dispatch(x, scores, chosen)
            out: Tensor = layer.combine(experts(routed.rows, routed.expert_offsets), routed.handle)
            x = x + self.dropout(out)
        return x

    def loss(self, batch: str, number: int, rank: int) -> Tensor:
        loss: Tensor = self(tokens_of(number, rank), ids_of(batch)).square().mean()
        return loss


def tokens_of(number: int, rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN_DIM, generator=torch.Generator().manual_seed(100 * number + rank))


def ids_of(batch: str) -> Tensor:
    """Of every rank: "even" spreads over the experts, "hot" names the last two, "mild" every expert but the first."""
    choices = {"even": [0, 1, 2, 3], "hot": [2, 3], "mild": [1, 2, 3]}[batch]
    return torch.tensor(choices).repeat(NUM_TOKENS * TOP_K)[: NUM_TOKENS * TOP_K].view(NUM_TOKENS, TOP_K)


def state_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of every parameter and of all that the optimizer keeps of it."""
    bits = {}
    for name, param in model.named_parameters():
        bits[name] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                bits[f"{name}, {key}"] = value.clone()
    return bits


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor], when: str) -> None:
    assert found.keys() == wanted.keys(), f"{when}: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), f"{when}: {name} differs"


def train_with_room(
    seat: Seat, make: str, batches: Sequence[str], skipped: Sequence[int] = (), *, dropout: float = 0.0
) -> dict[str, Tensor]:
    """The run with room for everything from the start, which leaves some batches out."""
    torch.manual_seed(seat.rank)
    with seat.open(guarded_config(row_capacity=ROOM, on_overflow="raise")) as dispatcher:
        model = Model(dispatcher, dropout=dropout)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            model.loss(batch, number, seat.rank).backward()
            if number not in skipped:
                optimizer.step()
        return state_bits(model, optimizer)
