"""A dispatcher's end: nothing stays behind, nothing hangs, and no order of ending is wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.group.gloo import OwnGloo
from crossdock.group.members import resolve_members
from tests.conftest import Ranks
from tests.faults.play import Batch, config, experts, step

MIB = 1 << 20
GROWTH_LIMIT = 8 * MIB


def held() -> tuple[int, int, int]:
    """Threads (those of the operating system), open file descriptors, resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident


def settled(wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is held once threads that are ending have ended."""
    deadline = time.monotonic() + 5.0
    while (now := held())[:2] > wanted[:2] and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def pair() -> cd.DispatcherConfig:
    return config(num_experts=4, timeout_s=20.0)


# -- many dispatchers (B108) ------------------------------------------------------------------------------------------


def many_at_once(rank: int) -> list[tuple[int, int, int]]:
    before = held()
    dispatchers = [cd.TokenDispatcher(pair()) for _ in range(64)]
    for dispatcher in dispatchers:
        step(dispatcher)
    for dispatcher in reversed(dispatchers):
        step(dispatcher)
        dispatcher.close()
    with pytest.raises(cd.ContractViolation, match="closed"):
        step(dispatchers[0])
    del dispatcher, dispatchers
    return [before, settled(before)]


def one_after_the_other(rank: int, closing: bool, num_cycles: int) -> list[tuple[int, int, int]]:
    def cycle() -> None:
        dispatcher, batch = cd.TokenDispatcher(pair()), Batch.of(rank, 5, 4)
        routed = dispatcher.dispatch(batch.x.requires_grad_(), batch.scores, batch.ids)
        dispatcher.combine(experts(dispatcher, routed), routed.handle).sum().backward()
        if closing:
            dispatcher.close()

    for _ in range(20):  # the allocator's own pools fill up first
        cycle()
    before = held()
    for _ in range(num_cycles):
        cycle()
    return [before, settled(before)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sixty_four_at_once(ranks: Ranks):
    for before, after in ranks(2).run(many_at_once):
        assert after[0] <= before[0], "threads stay behind"
        assert after[1] <= before[1], "file descriptors stay behind"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("closing", "num_cycles"),
    [(True, 60), pytest.param(True, 200, marks=pytest.mark.full), (False, 40)],
    ids=["closed", "closed, more of them", "dropped"],
)
def test_one_after_the_other(ranks: Ranks, closing: bool, num_cycles: int):
    for before, after in ranks(2).run(one_after_the_other, closing, num_cycles):
        assert after[0] <= before[0], "threads stay behind"
        assert after[1] <= before[1], "file descriptors stay behind"
        assert after[2] - before[2] < GROWTH_LIMIT, f"{(after[2] - before[2]) / MIB:.1f} MiB more"


def close_twice_from_two_threads(rank: int) -> bool:
    dispatcher = cd.TokenDispatcher(pair())
    step(dispatcher)
    threads = [threading.Thread(target=dispatcher.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    return not any(thread.is_alive() for thread in threads)


def test_close_may_be_called_from_anywhere(ranks: Ranks):
    assert ranks(2).run(close_twice_from_two_threads) == [True, True]


def drop_in_an_exchange(rank: int) -> float:
    """How long a collection took that met a communicator whose exchange the other rank has not joined."""
    own: Any = OwnGloo(resolve_members(None, None), "dropped in an exchange", 30.0)
    own.held_in_a_cycle = own
    if rank == 0:
        own.group.allreduce([torch.ones(4)])
    begun = time.monotonic()
    if rank == 0:
        del own
        gc.collect()
    took = time.monotonic() - begun
    dist.barrier()
    own = None
    gc.collect()
    return took


def test_a_collection_does_not_wait_for_an_exchange(ranks: Ranks):
    assert ranks(2).run(drop_in_an_exchange)[0] < 5


def fork_a_worker(rank: int) -> bool:
    """As a data loader does; its worker's end must not end this process's answers to its peers."""
    with cd.TokenDispatcher(pair()) as dispatcher:
        step(dispatcher)
        child = os.fork()
        if child == 0:
            dispatcher._open.session.close()
            os._exit(0)
        os.waitpid(child, 0)
        step(dispatcher)
        peers = dispatcher._open.session.peers
        from crossdock.group.status import ask

        answering = all(ask(peer)["phase"] in ("idle", "in_call") for peer in peers)
        dist.barrier()
        return answering


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_closes_takes_nothing_along(ranks: Ranks):
    assert ranks(2).run(fork_a_worker) == [True, True]


def drop_in_a_worker(rank: int) -> int | None:
    """How a worker ends that lets go of its copies of a dispatcher and a guard, which its threads did not come to."""
    dispatcher = cd.TokenDispatcher(pair(), backend="all_to_all")
    weight = torch.nn.Parameter(torch.ones(1))
    guard = cd.OverflowGuard(dispatcher, torch.optim.SGD([weight]))
    step(dispatcher)
    guard.step()
    child = os.fork()
    if child == 0:
        del dispatcher, guard
        gc.collect()
        os._exit(7)
    deadline, ended = time.monotonic() + 10.0, None
    while ended is None and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended = os.waitstatus_to_exitcode(status) if pid else None
        time.sleep(0.01)
    if ended is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    step(dispatcher)
    guard.step()
    dispatcher.close()
    return ended


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_lets_go_ends(ranks: Ranks):
    assert ranks(2).run(drop_in_a_worker) == [7, 7]


# -- the interpreter's end (B93, B109) --------------------------------------------------------------------------------

# Torch is imported once; every rank is a fork of that, runs off the end of the script and finalises as any interpreter.
SCRIPT = """
import gc, os, signal, sys, time
import torch._dynamo
import torch.distributed as dist
import crossdock as cd
from tests.faults.play import config, step

gc.freeze()  # what is there already is nobody's garbage, and twenty interpreters would look through it
ranks = {}
for number, rank in [(number, rank) for number in range(len(BODIES)) for rank in range(2)]:
    if rank == 0:
        read_port, write_port = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        os.dup2(os.open(f"{FOLDER}/{number}-{rank}", os.O_CREAT | os.O_WRONLY), 2)
        break
    ranks[child] = number, rank
if child:
    for _ in range(len(ranks)):
        child, status = os.wait()
        number, rank = ranks.pop(child)
        print(number, rank, os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)
port = 0 if rank == 0 else int(os.read(read_port, 10))
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    os.write(write_port, str(store.port).encode())
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dispatcher = cd.TokenDispatcher(config(num_experts=4, timeout_s=4.0))
step(dispatcher)
step(dispatcher)
exec(BODIES[number])
"""

DROPS = """
import torch
from crossdock.group.gloo import OwnGloo
from crossdock.group.members import resolve_members

own = OwnGloo(resolve_members(None, None), "dropped", 4.0)
if rank == 0:
    own.group.allreduce([torch.ones(2)])
else:
    time.sleep(0.7)
del own
"""

# What each of two ranks does after two steps, and their exit codes.
ENDINGS = {
    "no close": ("", (0, 0)),
    "one of them is slow": ("time.sleep(2.0 * rank)", (0, 0)),
    "the slow one is rank 0": ("time.sleep(2.0 * (1 - rank))", (0, 0)),
    "the group goes first": ("dist.destroy_process_group(); del dispatcher", (0, 0)),
    "the group goes last": ("del dispatcher; dist.destroy_process_group()", (0, 0)),
    "close after the group": ("dist.destroy_process_group(); dispatcher.close(); dispatcher.close()", (0, 0)),
    "rank 1 leaves an exchange while rank 0, which has dropped it, ends": (DROPS, (0, 0)),
    "rank 1 raises while rank 0 closes": ("1 // (1 - rank); dispatcher.close()", (0, 1)),
    "rank 1 has no third step": ("if rank == 0: step(dispatcher)", (1, 0)),
    "an error that nobody catches": ("step(dispatcher, num_tokens_per_rank=8 + rank)", (1, 1)),
}


@dataclass(frozen=True)
class Ending:
    exit_codes: tuple[int, ...]
    errors: tuple[str, ...]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """How two ranks ended in each of the ways above."""
    folder = tmp_path_factory.mktemp("endings")
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    values = f"FOLDER = {str(folder)!r}; BODIES = {[body for body, _ in ENDINGS.values()]!r}"
    run = subprocess.run(
        [sys.executable, "-c", values + SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    codes = {(int(number), int(rank)): int(code) for number, rank, code in map(str.split, run.stdout.splitlines())}
    return {
        ending: Ending(
            tuple(codes[number, rank] for rank in range(2)),
            tuple((folder / f"{number}-{rank}").read_text() for rank in range(2)),
        )
        for number, ending in enumerate(ENDINGS)
    }


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends(endings: dict[str, Ending], ending: str):
    told = endings[ending]
    assert told.exit_codes == ENDINGS[ending][1], "\n".join(told.errors)
    if ending == "rank 1 has no third step":
        assert "PeerTimeout: ranks [1] were missing in call 4 (dispatch of layer 'blocks.7.moe')" in told.errors[0]
    if ending == "an error that nobody catches":
        assert all("ContractViolation: ranks [1] made another call" in errors for errors in told.errors)
