"""`symmetric` under stress: programs and ranks dawdle at random, and no bit changes; a race would be found.

In the interpreter the programs of a launch run one after the other: on CPUs ranks race, and on GPUs programs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from crossdock.testing import PoolRunner, RankPool, Seat
from tests.conftest import Ranks
from tests.gpus import on_gpus

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

import triton.language as tl

from crossdock.backends.symmetric import plan
from crossdock.kernels import stress as slowed
from crossdock.kernels.signal import wait_for as prompt_wait_for
from crossdock.kernels.stress import dawdle
from crossdock.testing.stress import configs, stress
from tests.backends.test_symmetric_fused import as_on_a_gpu

NAME = "symmetric"


def test_ranks_and_programs_that_dawdle_change_no_bit(ranks: Ranks):
    names = ("few, fast", "many, exact")
    assert PoolRunner(ranks(2), NAME)(stress, 10, 1, 2, names, timeout_s=100.0) == [[], []]


@pytest.mark.full
@pytest.mark.timeout(700)
def test_all_kernels_many_times(ranks: Ranks):
    assert PoolRunner(ranks(2), NAME)(stress, 600, 2, timeout_s=600.0) == [[], []]


def _fused(seat: Seat, *args: Any) -> list[str]:
    with as_on_a_gpu():
        return stress(seat, *args)


@pytest.mark.full
@pytest.mark.timeout(700)
def test_kernels_that_wait_and_tell_by_themselves(ranks: Ranks):
    names = [name for name in configs(on_gpu=False) if name.startswith("many")]
    assert PoolRunner(ranks(2), NAME)(_fused, 100, 3, 4, names, timeout_s=600.0) == [[], []]


# -- a race is found --------------------------------------------------------------------------------------------------


def wait_for_nothing(
    signals_ptr, state_ptr, desk_ptr, word, target, digest, max_polls, polls_per_look,
    COMPARES: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for all but the rows that have been laid out, whose words begin with the sixth."""
    dawdle(state_ptr)
    code = tl.full((), 1, tl.int32)
    if word < 6:
        code = prompt_wait_for(
            signals_ptr, state_ptr, desk_ptr, word, target, digest, max_polls, polls_per_look, COMPARES,
            EP_SIZE, EP_BLOCK,
        )  # fmt: skip
    return code


def _with_a_race(seat: Seat, *args: Any) -> list[str]:
    """Nobody waits for rows, and rank 1 is late with every launch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(slowed.SLOWED, "wait_for", wait_for_nothing)
        if seat.rank == 1:
            monkeypatch.setattr(slowed, "_ONE_LAUNCH_IN", 1)
        return stress(seat, *args)


def test_rows_that_are_not_waited_for_are_found(ranks: Ranks):
    told = PoolRunner(ranks(2), NAME)(_with_a_race, 5, 1, 2, ("many, fast",), timeout_s=60.0)
    assert told[0], "nothing was found"
    assert not any("counts" in words or "offsets" in words for of_rank in told for words in of_rank), told


# -- on GPUs ----------------------------------------------------------------------------------------------------------


def _without_small_kernels(seat: Seat, *args: Any) -> list[str]:
    """Small batches take the general kernels too."""
    of = plan.Plan.of
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plan.Plan, "of", lambda spec, device: of(spec, device)._replace(small=0))
        return stress(seat, *args)


@pytest.mark.gpu
@pytest.mark.timeout(460)
@pytest.mark.parametrize("run", [stress, _without_small_kernels], ids=["small", "general"])
def test_ten_thousand_calls_on_gpus(run: Callable[..., list[str]]):
    with RankPool(2, **on_gpus(2)) as pool:
        assert PoolRunner(pool, NAME)(run, 5_000, 4, timeout_s=400.0) == [[], []]
