"""Workspaces between real ranks: what one writes all see, and nothing is left of them."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crossdock.errors import BackendUnavailable
from crossdock.group.faults import TransportFault
from crossdock.group.members import Members, resolve_members
from crossdock.memory import host
from crossdock.memory.workspace import BufferSpec, Workspace, place_buffers
from crossdock.testing import start_ranks
from tests.conftest import Ranks
from tests.memory.shared_files import shared_files

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files of memory are Linux's")

CPU = torch.device("cpu")
BUFFERS = [
    BufferSpec("words", (2, 3), torch.int64),
    BufferSpec("rows", (5, 7), torch.bfloat16),
    BufferSpec("nothing", (0, 4), torch.float32),
]


def opened(name: str, members: Members | None = None, timeout_s: float = 10.0) -> Workspace:
    return Workspace.open(BUFFERS, members or resolve_members(None, None), CPU, f"tests/{name}", timeout_s)


def test_places():
    assert place_buffers(BUFFERS) == ([0, 256, 512], 768)


def test_a_group_of_one():
    workspace = opened("alone", Members(0, (0,), CPU, "none"))
    workspace.own["words"].fill_(7)
    assert workspace.of_rank("words", 0).tolist() == [[7] * 3] * 2
    assert workspace.table["words"].tolist() == [workspace.own["words"].data_ptr()]
    assert workspace.num_bytes == 768


def _write_and_read(rank: int) -> list[tuple[list[int], float, bool]]:
    workspace = opened("shared")
    untouched = all(not tensor.any() for tensor in workspace.own.values())
    workspace.own["words"].fill_(10 + rank)
    workspace.own["rows"].fill_(0.5 * rank)
    dist.barrier()
    seen = []
    for peer in range(dist.get_world_size()):
        words, rows = workspace.of_rank("words", peer), workspace.of_rank("rows", peer)
        addressed = int(workspace.table["words"][peer]) == words.data_ptr() and words.data_ptr() % 256 == 0
        seen.append((words.flatten().tolist(), float(rows[4, 6]), untouched and addressed))
    dist.barrier()
    workspace.of_rank("words", (rank + 1) % dist.get_world_size())[1, 2] = 100 + rank
    dist.barrier()
    assert int(workspace.own["words"][1, 2]) == 100 + (rank - 1) % dist.get_world_size()
    workspace.close()
    return seen


def test_every_rank_sees_what_one_writes(ranks: Ranks):
    expected = [([10 + peer] * 6, 0.5 * peer, True) for peer in range(4)]
    assert ranks(4).run(_write_and_read) == [expected] * 4


_Footprint = tuple[int, int, list[str]]


def _footprint() -> _Footprint:
    mapped = Path("/proc/self/maps").read_text().count("memfd:crossdock")
    return mapped, len(os.listdir("/proc/self/fd")), shared_files()


def _open_again_and_again(rank: int) -> tuple[_Footprint, _Footprint]:
    opened("warm").close()
    gc.collect()  # what the interpreter was given by earlier tests of these ranks
    before = _footprint()
    for number in range(200):
        opened(f"again{number}").close()
    deadline = time.monotonic() + 5.0
    while (after := _footprint()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, after


def test_two_hundred_cycles_leak_nothing(ranks: Ranks):
    for before, after in ranks(2).run(_open_again_and_again, timeout_s=60.0):
        assert before == after
        assert after[0] == 0


def test_the_mapping_goes_when_a_rank_is_killed():
    with start_ranks(_hold, 2) as started:
        deadline = time.monotonic() + 20.0
        while any(not _maps(pid) for pid in started.pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(_maps(pid) == 2 for pid in started.pids)
        started.kill(0)
        time.sleep(0.2)
        assert _maps(started.pids[1]) == 2  # what the other one sees stays there
    assert not shared_files()


def _hold(rank: int) -> None:
    workspace = opened("held")
    time.sleep(60.0)
    workspace.close()


def _maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:crossdock")


def _with_places(rank: int, odd: int) -> str:
    if rank == odd:
        setattr(host, "identity", lambda: "elsewhere")  # noqa: B010
    try:
        opened("places")
    except BackendUnavailable as error:
        return str(error)
    return "opened"


def test_a_group_over_several_hosts_is_refused_on_every_rank():
    with start_ranks(_with_places, 3, 1) as started:
        told = [result.value for result in started.results()]
    assert len(set(told)) == 1
    assert "the group spans hosts or containers (ranks [0, 2] on" in told[0] and "ranks [1] on" in told[0]


def _hidden(rank: int) -> str:
    if rank == 1:
        setattr(os, "getpid", lambda: 2**22)  # noqa: B010
    try:
        opened("hidden")
    except BackendUnavailable as error:
        return str(error)
    return "opened"


def test_a_block_that_cannot_be_mapped_is_told_on_every_rank():
    with start_ranks(_hidden, 2) as started:
        told = [result.value for result in started.results()]
    assert len(set(told)) == 1
    assert "a peer's memory cannot be mapped" in told[0] and "No such file" in told[0]


def _without_the_last(rank: int) -> tuple[str, float]:
    begun = time.monotonic()
    if rank == 1:
        return "", 0.0
    try:
        opened("missing", timeout_s=0.5)
    except TransportFault as error:
        return str(error), time.monotonic() - begun
    return "opened", 0.0


def test_a_rank_that_does_not_come(ranks: Ranks):
    message, took_s = ranks(2).run(_without_the_last)[0]
    assert "not all ranks came to share memory" in message and took_s < 3.0
