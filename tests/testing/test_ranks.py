"""Starting ranks: results and faults come back whole, and no rank stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from crossdock.testing import RankPool, RanksFailed, _world, run_ranks, start_ranks
from tests.conftest import Ranks


def summed(rank: int, value: int) -> int:
    tensor = torch.tensor([value * (rank + 1)])
    dist.all_reduce(tensor)
    return int(tensor)


def summed_on_gpu(rank: int) -> tuple[int, int]:
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    return torch.cuda.current_device(), int(tensor)


def pid(rank: int) -> int:
    return os.getpid()


def facts(rank: int) -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def echoed(rank: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values


def raises_on(rank: int, bad_rank: int) -> None:
    if rank == bad_rank:
        raise LookupError(f"no luck on rank {rank}")


def raises_or_waits(rank: int, bad_rank: int) -> None:
    raises_on(rank, bad_rank)
    dist.barrier()


def exits(rank: int, bad_rank: int) -> None:
    if rank == bad_rank:
        os._exit(7)


def kills_itself(rank: int, bad_rank: int) -> None:
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleeps_soundly(rank: int, bad_rank: int) -> None:
    if rank == bad_rank:
        time.sleep(60)


def warns(rank: int) -> str:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)
    return "warned"


def unsendable(rank: int) -> object:
    return lambda: rank


def slowly(rank: int, seconds: float) -> int:
    time.sleep(seconds)
    return rank


def barrier_after(rank: int, seconds: float) -> str:
    time.sleep(seconds)
    dist.barrier()
    return "met"


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def assert_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(map(is_gone, process_ids)):
        time.sleep(0.05)
    assert [process_id for process_id in process_ids if not is_gone(process_id)] == []


def test_run_ranks_returns_results_by_rank():
    assert run_ranks(summed, 2, 5) == [15, 15]


def test_ranks_know_their_world_and_take_one_thread(ranks: Ranks):
    assert ranks(2).run(facts) == [(0, 2, 1), (1, 2, 1)]


def test_a_closed_pool_starts_no_ranks():
    pool = RankPool(1, backend=None)
    pool.close()
    with pytest.raises(RuntimeError, match="this pool of ranks is closed"):
        pool.run(pow, 2)
    assert not pool.pids


def test_a_pool_serves_one_thread_at_a_time():
    with RankPool(1, backend=None) as pool, ThreadPoolExecutor(1) as threads:
        first = threads.submit(pool.run, slowly, 1.0)
        while not pool.pids:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="is running a call of another thread"):
            pool.run(pow, 2)
        assert first.result() == [0]


@pytest.mark.parametrize(("backend", "device_type"), [("gloo", "gpu"), ("nccl", "cpu")])
def test_a_wrong_device_is_refused_before_any_rank_starts(backend: str, device_type: str):
    with pytest.raises(ValueError, match=f"got '{device_type}' with '{backend}'"):
        RankPool(2, backend=backend, device_type=device_type)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_ranks_on_gpus_that_are_not_there():
    with pytest.raises(RanksFailed, match="rank 0 of 1 needs a CUDA device, torch sees none"):
        run_ranks(pow, 1, 2, device_type="cuda")


@pytest.mark.gpu(2)
def test_gpu_ranks_have_a_device_each(gpu_ranks: Ranks):
    assert gpu_ranks(2).run(summed_on_gpu) == [(0, 2), (1, 2)]


def test_without_a_backend_there_is_no_group():
    assert run_ranks(pow, 3, 2, backend=None) == [0, 1, 4]


def test_pool_keeps_its_ranks(ranks: Ranks):
    pool = ranks(2)
    assert pool.run(pid) == pool.run(pid) == pool.pids
    assert len({os.getpid(), *pool.pids}) == 3


def test_pool_needs_a_rank():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RankPool(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_travel_to_the_bit(ranks: Ranks, dtype: torch.dtype):
    raw = torch.arange(64, dtype=torch.uint8) if dtype is not torch.bool else torch.arange(64, dtype=torch.uint8) % 2
    sent = [raw.view(dtype).reshape(2, -1).t(), torch.empty(0, 3, dtype=dtype), torch.ones((), dtype=dtype)]
    for received in ranks(2).run(echoed, *sent):
        for tensor, original in zip(received, sent, strict=True):
            assert tensor.dtype is original.dtype
            assert tensor.shape == original.shape
            bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (tensor, original)]
            assert torch.equal(*bits)
            tensor.zero_()  # writable


def test_gradients_are_left_behind(ranks: Ranks):
    (received,) = ranks(2).run(echoed, torch.ones(2, requires_grad=True) * 2)[0]
    assert not received.requires_grad


def test_a_traceback_is_shown_whole(ranks: Ranks):
    with pytest.raises(RanksFailed, match="failed on rank 1 of 2") as failure:
        ranks(2).run(raises_on, 1)
    text = str(failure.value)
    assert "LookupError: no luck on rank 1" in text
    assert "in raises_on" in text
    assert failure.value.results[0].ok
    assert failure.value.results[1].error_type == "LookupError"
    assert failure.value.results[1].message == "no luck on rank 1"


def test_a_warning_is_what_it_is_here(ranks: Ranks):
    with pytest.raises(RanksFailed, match="UserWarning: mind the gap"):
        ranks(2).run(warns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks(2).run(warns) == ["warned", "warned"]


def test_a_failure_does_not_wait_for_those_who_wait_for_it(ranks: Ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="failed on rank 0, 1 of 2") as failure:
        ranks(2).run(raises_or_waits, 0)
    assert time.monotonic() - start < 10
    assert failure.value.results[1].silent
    assert "in raises_or_waits" in failure.value.results[1].stacks


def test_the_next_call_has_fresh_ranks(ranks: Ranks):
    pool = ranks(2)
    before = pool.run(pid)
    with pytest.raises(RanksFailed):
        pool.run(raises_on, 0)
    assert_gone(before)
    assert pool.run(summed, 1) == [3, 3]


@pytest.mark.parametrize(("fault", "words"), [(exits, "exit code 7"), (kills_itself, "killed by SIGKILL")])
def test_a_death_is_named(ranks: Ranks, fault, words: str):
    with pytest.raises(RanksFailed, match=rf"(?s)failed on rank 1 of 2.*rank 1 died: {words}"):
        ranks(2).run(fault, 1)


def test_a_timeout_names_the_rank_and_where_it_is(ranks: Ranks):
    with pytest.raises(RanksFailed, match="failed on rank 1 of 2") as failure:
        ranks(2).run(sleeps_soundly, 1, timeout_s=0.5)
    assert "rank 1 has not answered" in str(failure.value)
    assert "in sleeps_soundly" in failure.value.results[1].stacks
    assert_gone(ranks(2).pids)


def test_an_interrupt_ends_all_ranks(ranks: Ranks):
    pool = ranks(2)
    started = pool.run(pid)
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleeps_soundly, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert_gone(started)


def is_deaf_to_interrupts(rank: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # as the server that it is forked from


def test_interrupts_are_the_launcher_s_alone(ranks: Ranks):
    assert ranks(2).run(is_deaf_to_interrupts) == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("elsewhere", [False, True], ids=["to this thread", "to another thread"])
def test_an_interrupt_of_a_start_comes_at_its_end(elsewhere: bool):
    started, handler = [], signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()  # its thread is there before anything is held back
        with pytest.raises(KeyboardInterrupt), _world._interrupts_held_back():
            if elsewhere:
                other.submit(signal.raise_signal, signal.SIGINT).result()
            else:
                signal.raise_signal(signal.SIGINT)
            started.append(True)
    assert started and signal.getsignal(signal.SIGINT) is handler


def test_a_function_that_cannot_be_found_is_refused(ranks: Ranks):
    with pytest.raises(ValueError, match="a function of a module"):
        ranks(2).run(lambda rank: rank)


def test_what_no_rank_can_import_is_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch):
    prompt = ModuleType("__main__")
    exec("def typed(rank): pass\nclass Typed: pass", vars(prompt))
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    for name, ask in (
        ("typed", lambda: run_ranks(prompt.typed, 2)),
        ("typed", lambda: start_ranks(prompt.typed, 2)),
        ("Typed", lambda: run_ranks(pow, 2, [prompt.Typed()])),
    ):
        with pytest.raises(
            ValueError, match=f"'{name}' came from a prompt, a notebook, standard input or -c, where no"
        ):
            ask()
    prompt.__file__ = "<stdin>"  # as Python says of `python -`
    with pytest.raises(ValueError, match="and this one, <stdin>, is no file: save it as one, and put what starts"):
        run_ranks(pow, 2, 1, backend=None)


def test_a_result_that_cannot_be_sent_is_told(ranks: Ranks):
    with pytest.raises(RanksFailed, match="the result of this rank cannot be sent"):
        ranks(2).run(unsendable)


@pytest.mark.parametrize("store_rank", [None, 0, 1])
def test_started_ranks_can_be_killed(store_rank: int | None):
    with start_ranks(barrier_after, 3, 0.5, store_rank=store_rank) as started:
        started.kill(1)
        results = started.results(timeout_s=20)
    assert results[1].exit_code == -signal.SIGKILL
    assert [result.ok for result in results] == [False, False, False]
    assert results[0].error_type == results[2].error_type == "RuntimeError"
    assert_gone(started.pids)


def test_started_ranks_can_be_paused_and_resumed():
    with start_ranks(barrier_after, 2, 0.5) as started:
        started.pause(0)
        paused = started.results(timeout_s=2)
        started.resume(0)
        resumed = started.results(timeout_s=60)
    assert [result.silent for result in paused] == [True, True]
    assert "in barrier_after" in paused[1].stacks
    assert paused[0].stacks == ""
    assert [result.value for result in resumed] == ["met", "met"]


def test_a_paused_rank_does_not_stay_behind():
    with start_ranks(barrier_after, 2, 0.0) as started:
        started.pause(1)
    assert_gone(started.pids)


def test_the_store_may_only_be_hosted_by_a_rank():
    with pytest.raises(ValueError, match=r"in \[0, 2\), got 2"):
        start_ranks(barrier_after, 2, 0.0, store_rank=2)


LAUNCHER = """
import os, sys, time
from crossdock.testing import _world, start_ranks
_world._NEEDED = ("torch",)  # these ranks open no dispatcher
started = start_ranks(time.sleep, 2, backend="gloo")
started.pause(1)
print(*started.pids, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "time.sleep(60)"])
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped rank is ended by the kernel, which Linux alone does")
def test_ranks_end_with_their_launcher(end: str):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(end=end)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with launcher:
        assert launcher.stdout is not None
        started = [int(word) for word in launcher.stdout.readline().split()]
        if "sleep" in end:
            launcher.send_signal(signal.SIGINT)
    assert len(started) == 2
    assert_gone(started)


def test_a_script_that_starts_ranks_wherever_it_is_imported(tmp_path: Path):
    script = tmp_path / "unguarded.py"
    script.write_text("from crossdock.testing import run_ranks\nrun_ranks(pow, 2, 1, backend=None)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    for rank in range(2):
        assert f"rank {rank} died: it imported the script that starts it, which started ranks again" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr and len(done.stderr.splitlines()) < 25
