"""Many dispatchers, at once and one after the other, in threads, beside the caller's own work, and their end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.testing import LoopbackGroup, Problem, Seat, run_ranks
from crossdock.testing.checks import check_trial, judge
from crossdock.testing.solving import forward, solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import checked, make_config, problem, random_ids, refused

# -- many of them, and the end ----------------------------------------------------------------------------------------


def many_at_once(seat: Seat, trial: Problem, count: int) -> None:
    dispatchers = [seat.open(trial.config) for _ in range(count)]
    try:
        for dispatcher in (*dispatchers, *reversed(dispatchers)):
            solve(dispatcher, trial, seat.rank, seat.device)
    finally:
        for dispatcher in dispatchers:
            dispatcher.close()


@every_backend(2)
def test_many_dispatchers_at_once(on: On, backend: str, ep_size: int):
    count = 6 if backend == "symmetric" else 16  # whose kernels are interpreted
    on(backend, 2)(many_at_once, problem(make_config(4, 2), random_ids((4, 4), 2, 4)), count)


def ends_without_close(rank: int, trial: Problem, order: str) -> str:
    dispatcher = cd.TokenDispatcher(trial.config)
    solve(dispatcher, trial, rank, torch.device("cpu"))
    if rank == 1:
        time.sleep(1)
    if order == "group first":
        dist.destroy_process_group()
    del dispatcher
    return "done"


@pytest.mark.parametrize("order", ["group first", "dispatcher first"])
def test_leaving_without_close(order: str):
    start = time.monotonic()
    trial = problem(make_config(4, 2, timeout_s=20.0), random_ids((4, 4), 2, 4))
    assert run_ranks(ends_without_close, 2, trial, order) == ["done", "done"]
    assert time.monotonic() - start < 15


def beside_collectives(seat: Seat, trial: Problem) -> str:
    """The library's communicator is its own: what the caller does on the group between calls does not matter."""
    group = seat.group()
    with seat.open(trial.config) as dispatcher:
        for step in range(10):
            pending = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            solve(dispatcher, trial, seat.rank, seat.device)
            if step % 2 == seat.rank:
                time.sleep(0.005)
            assert pending is not None
            pending.wait()
        return dispatcher.backend_name


def test_collectives_of_the_caller_on_the_same_group(on: On):
    trial = problem(make_config(4, 2), random_ids((4, 4), 2, 4))
    assert on("all_to_all", 2)(beside_collectives, trial) == ["all_to_all"] * 2


@every_backend(2)
def test_nothing_travels_between_some_ranks(on: On, backend: str, ep_size: int):
    own_only = [[[0, 1]] * 4, [[2, 3]] * 4]
    on(backend, 2)(checked, problem(make_config(4, 2), own_only))


@every_backend(4)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_two_ranks_have_nothing_for_each_other_and_much_for_the_rest(
    on: On, backend: str, ep_size: int, reduction: str
):
    ids = [[[0, 2]] * 4, [[1, 3]] * 3, [[0, 1]] * 2, [[1, 3]] * 5]  # ranks 0 and 1, and ranks 0 and 3
    on(backend, 4)(checked, problem(make_config(4, 2, reduction=reduction), ids))


# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_kept_out():
    group = LoopbackGroup(2)
    config = make_config(4, 2, timeout_s=5.0)
    trial = problem(config, random_ids((4, 4), 2, 4))
    entered = threading.Event()
    messages: list[str] = []

    def peer() -> None:
        with cd.TokenDispatcher(config, group.member(1)) as dispatcher:
            entered.wait()
            solve(dispatcher, trial, 1, torch.device("cpu"))

    def first(dispatcher: cd.TokenDispatcher) -> None:
        solve(dispatcher, trial, 0, torch.device("cpu"))

    threads = [threading.Thread(target=peer)]
    threads[0].start()
    with cd.TokenDispatcher(config, group.member(0)) as dispatcher:
        threads.append(threading.Thread(target=first, args=(dispatcher,)))
        threads[1].start()
        time.sleep(0.2)  # it is inside dispatch now, waiting for its peer
        messages.append(refused(lambda: first(dispatcher), cd.ContractViolation))
        entered.set()
        for thread in threads:
            thread.join()
        dispatcher.check()
    assert "one dispatcher serves one thread at a time" in messages[0]


def two_threads(seat: Seat, trial: Problem, num_steps: int) -> None:
    """One half-batch a thread and dispatcher; the second half brings nothing on rank 1."""
    halves = [trial, trial.replace(**{name: (part[0], part[1][:0]) for name, part in tensors_of(trial).items()})]
    dispatchers = [seat.open(half.config) for half in halves]

    def work(half: Problem, dispatcher: cd.TokenDispatcher) -> None:
        for _ in range(num_steps):
            attempt = forward(dispatcher, half, seat.rank, seat.device)
            check_trial(judge(attempt, attempt.backward()))

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(work, *pair) for pair in zip(halves, dispatchers, strict=True)]
    for dispatcher in dispatchers:
        dispatcher.close()
    for call in calls:
        call.result()


def tensors_of(trial: Problem) -> dict[str, tuple[torch.Tensor, ...]]:
    return {name: getattr(trial, name) for name in ("x", "topk_scores", "topk_expert_ids", "grad_out")}


@every_backend(2)
def test_two_threads_with_a_dispatcher_each(on: On, backend: str, ep_size: int):
    num_steps = 6 if backend == "symmetric" else 20  # whose kernels are interpreted
    on(backend, 2)(two_threads, problem(make_config(4, 2), random_ids((8, 8), 2, 4)), num_steps)
