"""Two hosts of two ranks each: the same bits as on one host, and a host that is cut off in the middle of a step."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks
from tests.multihost import train
from tests.multihost.hosts import TwoHosts, running, two_hosts, why_not

pytestmark = pytest.mark.alone

NUM_RANKS = 4
START_S = 80.0  # six processes import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[tuple[TwoHosts, list[subprocess.Popen[bytes]]]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"network namespaces cannot be made: {reason}")
    with two_hosts() as hosts, running(hosts, Path(train.__file__), [str(folder)], folder) as launchers:
        yield hosts, launchers


def by_rank(
    folder: Path, pattern: str, timeout_s: float, launchers: Sequence[subprocess.Popen[bytes]]
) -> dict[int, Path]:
    """The file of every rank, once all have written theirs."""
    deadline = time.monotonic() + timeout_s
    files = {rank: folder / pattern.format(rank) for rank in range(NUM_RANKS)}
    while not all(file.exists() for file in files.values()):
        has_failed = any(launcher.poll() not in (None, 0) for launcher in launchers)
        if has_failed or time.monotonic() > deadline:
            missing = [rank for rank, file in files.items() if not file.exists()]
            logs = "\n".join(log.read_text()[-4000:] for log in sorted(folder.glob("*.log")))
            pytest.fail(f"nothing came from ranks {missing}\n{logs}")
        time.sleep(0.05)
    return files


def read(files: dict[int, Path]) -> list[Any]:
    return [json.loads(files[rank].read_text()) for rank in range(NUM_RANKS)]


def test_two_hosts_train_to_the_same_bits_as_one(
    hosts: tuple[TwoHosts, list[subprocess.Popen[bytes]]], folder: Path, ranks: Ranks
):
    on_two_hosts = read(by_rank(folder, "trained{}.json", START_S, hosts[1]))
    assert on_two_hosts == ranks(NUM_RANKS).run(train.train)


def test_a_host_that_is_cut_off(hosts: tuple[TwoHosts, list[subprocess.Popen[bytes]]], folder: Path):
    link, launchers = hosts
    by_rank(folder, "started{}", START_S, launchers)
    link.cut()
    accounts = read(by_rank(folder, "cut{}.json", train.TIMEOUT_S + 10.0, launchers))
    for rank, account in enumerate(accounts):
        assert account["ranks"] == ([2, 3] if rank < 2 else [0, 1]), account
        assert account["took_s"] < train.TIMEOUT_S + 5.0, account
        assert account["close_s"] <= train.TIMEOUT_S, account
        assert "it does not answer (stopped, or its host cannot be reached" in account["message"], account
        assert "of layer 'moe'" in account["message"], account
    assert len({account["message"].split("; the rendezvous")[0] for account in accounts[2:]}) == 1
