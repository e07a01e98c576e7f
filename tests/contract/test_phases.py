"""Prefill and decode on the same ranks: a dispatcher for each, and which one a call goes to is what the caller says."""

from __future__ import annotations

import time

import pytest
import torch

import crossdock as cd
from crossdock.testing import Problem, Seat
from crossdock.testing.checks import check_trial, judge
from crossdock.testing.solving import forward
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, problem, random_ids, refused

PREFILL = make_config(8, 4, 32, num_max_tokens_per_rank=600, reduction="fast")  # too many for kernels of small batches
DECODE = make_config(8, 4, 32, num_max_tokens_per_rank=4, row_capacity=cd.RowCapacity.worst_case(), reduction="fast")


def drawn(config: cd.DispatcherConfig, num_tokens: tuple[int, ...], step: int) -> Problem:
    return problem(config, random_ids(num_tokens, 4, 8, seed=step), seed=step)


def in_turns(seat: Seat, steps: list[tuple[str, Problem]]) -> list[int]:
    """Every step on the dispatcher that it names, checked to the bit; the storage of both, before and after."""
    with seat.open(PREFILL) as prefill, seat.open(DECODE) as decode:
        storage = [prefill.workspace_bytes, decode.workspace_bytes]
        for phase, trial in steps:
            attempt = forward({"P": prefill, "D": decode}[phase], trial, seat.rank, seat.device)
            check_trial(judge(attempt, attempt.backward()))
        assert [prefill.workspace_bytes, decode.workspace_bytes] == storage
        return [prefill.stats().calls, decode.stats().calls]


@every_backend(2)
def test_prefill_and_decode_in_any_order_leave_nothing_behind(on: On, backend: str, ep_size: int):
    sizes = {"P": (9, 7), "D": (4, 3)}
    steps = [
        (phase, drawn({"P": PREFILL, "D": DECODE}[phase], sizes[phase], step))
        for step, phase in enumerate(
            "PPDDPDDDP" if backend != "symmetric" else "PDDPD"
        )  # whose kernels are interpreted
    ]
    calls = [4 * sum(phase == each for each, _ in steps) for phase in "PD"]  # four a step
    assert on(backend, ep_size)(in_turns, steps) == [calls] * 2


@every_backend(2)
def test_a_short_prefill_stays_a_prefill_and_an_idle_rank_decodes_with_the_others(on: On, backend: str, ep_size: int):
    calls = [("P", (9, 9)), ("D", (2, 2)), ("P", (2, 2)), ("D", (2, 0)), ("P", (0, 1))]
    steps = [
        (phase, drawn({"P": PREFILL, "D": DECODE}[phase], sizes, step)) for step, (phase, sizes) in enumerate(calls)
    ]
    assert on(backend, ep_size)(in_turns, steps) == [[12, 8]] * 2


def of_two_minds(seat: Seat) -> tuple[tuple[int, ...], str, float]:
    """Rank 0 decodes, rank 1 takes the same tokens for a prefill: whom the error names, its text, its time."""
    configs = [make_config(8, 4, 32, num_max_tokens_per_rank=size, timeout_s=1.5) for size in (600, 4)]
    with seat.open(configs[0]) as prefill, seat.open(configs[1]) as decode:
        mine = (decode, prefill)[seat.rank].layer("decode" if seat.rank == 0 else "prefill")
        begun = time.monotonic()
        with pytest.raises(cd.PeerTimeout) as failure:
            mine.dispatch(torch.ones(2, 32), torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.int64))
        took_s = time.monotonic() - begun
        assert refused(mine.dispatcher.check, cd.PeerTimeout) == str(failure.value)
        prefill._open.close()
        decode._open.close()
    return failure.value.ranks, str(failure.value), took_s


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["all_to_all", "symmetric"])
def test_ranks_of_two_minds_miss_each_other_by_name(on: On, backend: str):
    if backend == "symmetric":
        pytest.importorskip("triton", reason="triton is published for Linux only")
    first, second = on(backend, 2)(of_two_minds)
    assert (first[0], second[0]) == ((1,), (0,))
    assert "ranks [1] were missing in call 0 (dispatch of layer 'decode')" in first[1]
    assert "ranks [0] were missing in call 0 (dispatch of layer 'prefill')" in second[1]
    assert max(first[2], second[2]) < 1.5 + 5.0
