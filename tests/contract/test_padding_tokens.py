"""Tokens that only fill up a batch, a backend's or a bound's, take up no row of a capacity and are counted nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import Seat, ThreadRunner
from tests.contract.conftest import BACKENDS, IN_THREADS, On
from tests.contract.picky import PickyBackend
from tests.contract.trials import make_config

IDS = torch.tensor([[0, 2], [3, 1], [1, 2], [0, 3], [2, 1]])  # of both ranks: each of them gets ten rows, no more


def filled_to_the_last_row(seat: Seat) -> list[int]:
    """Five tokens of sixteen that there might be, and exactly as many rows as they need."""
    config = make_config(4, 2, 64, num_max_tokens_per_rank=32, row_capacity=cd.RowCapacity.rows(10))
    x = 16.0 * seat.rank + torch.arange(5.0).unsqueeze(1).expand(5, 64) + 1
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(x, torch.ones(5, 2), IDS, num_tokens_per_rank=16)
        out = dispatcher.combine(routed.rows, routed.handle)
        stats = dispatcher.stats()  # raises where rows were dropped
    assert torch.equal(out, 2 * x)
    account = stats.layers[""]
    assert (account.overflows, account.rows_wanted, account.rows, account.tokens) == (0, 10, 10, 5)
    assert account.wanted_by_expert == tuple(routed.tokens_per_expert.tolist())
    assert routed.rows.shape[0] == int(routed.expert_offsets[-1]) == 10
    return [int(count) for count in routed.tokens_per_expert]


PICKY: list[Any] = [PickyBackend(8, equal=False), PickyBackend(8, equal=True)]


@pytest.mark.parametrize("backend", [*(name for name, sizes in BACKENDS.items() if 2 in sizes), *PICKY], ids=str)
def test_tokens_that_fill_up_a_batch_take_no_rows(on: On, backend: Any):
    in_threads = backend in IN_THREADS or backend in PICKY
    run = ThreadRunner(2, backend) if in_threads else on(backend, 2)
    assert run(filled_to_the_last_row) == [[4, 6], [6, 4]]


@pytest.mark.parametrize("field", ["num_experts", "hidden_dim", "num_max_tokens_per_rank", "expert_alignment"])
def test_sizes_that_no_index_can_hold_are_refused(field: str):
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "hidden_dim": 64,
        "num_max_tokens_per_rank": 32,
        "expert_alignment": 1,
        field: 2**31,
    }
    with pytest.raises(cd.ConfigError, match=rf"^{field} must be at most 2147483647, got 2147483648$"):
        cd.DispatcherConfig(top_k=2, dtype=torch.float32, **sizes)
