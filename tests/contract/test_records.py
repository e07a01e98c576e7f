"""What is configured and what a dispatch hands out: rebuilt with every field, and never written to."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import Seat
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, refused

USUAL = cd.DispatcherConfig(num_experts=4, top_k=2, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=16)
# Another value for every field; `quantization` has only one.
OTHERWISE: dict[str, Any] = {
    "num_experts": 12,
    "top_k": 3,
    "hidden_dim": 40,
    "dtype": torch.bfloat16,
    "num_max_tokens_per_rank": 600,
    "row_capacity": cd.RowCapacity.rows(64),
    "expert_alignment": 16,
    "reduction": "exact",
    "on_overflow": "drop",
    "equal_token_counts": True,
    "distinct_experts": True,
    "zero_tail": True,
    "num_sms": 8,
    "timeout_s": 12.5,
}
CAPACITIES = (
    cd.RowCapacity.exact(),
    cd.RowCapacity.worst_case(0.5),
    cd.RowCapacity.balanced(1.25),
    cd.RowCapacity.calibrated(1.1),
    cd.RowCapacity.rows(64),
)


def rebuilt(config: cd.DispatcherConfig) -> cd.DispatcherConfig:
    """From what a file or a peer would hold of it."""
    return cd.DispatcherConfig.from_dict(json.loads(json.dumps(config.as_dict())))


def test_a_configuration_is_rebuilt_with_every_field():
    names = {field.name for field in dataclasses.fields(cd.DispatcherConfig)}
    assert names == {*OTHERWISE, "quantization"}
    config = cd.DispatcherConfig(**OTHERWISE)
    for name, value in OTHERWISE.items():
        assert getattr(USUAL, name) != value
        assert getattr(rebuilt(config), name) == value, name
    assert rebuilt(config) == config
    assert rebuilt(USUAL) == USUAL
    assert set(config.as_dict()) == names


@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
def test_every_row_capacity_is_rebuilt(capacity: cd.RowCapacity):
    config = dataclasses.replace(USUAL, row_capacity=capacity)
    assert rebuilt(config).row_capacity == capacity


def test_what_is_left_out_is_as_usual_and_what_is_unknown_is_refused():
    needed = ("num_experts", "top_k", "hidden_dim", "dtype", "num_max_tokens_per_rank")
    plain = USUAL.as_dict()
    assert cd.DispatcherConfig.from_dict({name: plain[name] for name in needed}) == USUAL
    told = refused(lambda: cd.DispatcherConfig.from_dict(plain | {"num_expert": 4}), cd.ConfigError)
    assert told.startswith("unknown configuration fields ['num_expert']; known are ['num_experts', ")


def written_to(seat: Seat) -> list[str]:
    """Fields of a dispatch and of its handle that could be set or deleted."""
    let = []
    with seat.open(make_config(4, 2, 8)) as dispatcher:
        routed = dispatcher.dispatch(torch.ones(3, 8), torch.ones(3, 2), torch.tensor([[0, 3]] * 3))
        for record in (routed, routed.handle):
            for field in dataclasses.fields(record):
                for change in (lambda r, name: setattr(r, name, getattr(r, name)), delattr):
                    try:
                        change(record, field.name)
                    except dataclasses.FrozenInstanceError:
                        continue
                    let.append(f"{type(record).__name__}.{field.name}")
        dispatcher.combine(routed.rows, routed.handle)
    return let


@every_backend(1, 2)
def test_nothing_of_a_dispatch_or_its_handle_can_be_set(on: On, backend: str, ep_size: int):
    assert on(backend, ep_size)(written_to) == [[]] * ep_size


def test_settings_cannot_be_set_either():
    for record, name in ((USUAL, "top_k"), (USUAL.row_capacity, "kind")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, getattr(record, name))
