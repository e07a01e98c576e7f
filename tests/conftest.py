"""What every test may use: ranks that are started once per size, `--full`, and the markers `gpu`, `full`, `alone`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest
import torch

from crossdock.testing import RankPool
from tests.alone import turn

# The ranks' processes and this one share the machine; results must not depend on its number of cores either.
torch.set_num_threads(1)

# Drawn cases are the same in every run, so that a red run can be looked into; --full draws more of them.
hypothesis.settings.register_profile("pairwise", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True, database=None, max_examples=250)

# Lent as the type of the `ranks` fixture: `ranks(4)` is the pool of 4 ranks.
Ranks = Callable[[int], RankPool]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole workload grid, not pairs of its values")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # it ignores Ctrl-C, and so would every program that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "pairwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            _skip_without_gpus(item, *marker.args, **marker.kwargs)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout: waiting for one's turn is not counted
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    alone, next_alone = (each is not None and each.get_closest_marker("alone") is not None for each in (item, nextitem))
    with turn(alone=alone, next_alone=next_alone):
        return (yield)


def _skip_without_gpus(item: pytest.Item, count: int = 1) -> None:
    if torch.cuda.device_count() < count:
        reason = f"needs {count} CUDA devices, this machine has {torch.cuda.device_count()}"
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Return True under `--full`."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return a function of the number of ranks: their pool on Gloo, started at its first call and kept."""
    yield from _pools("gloo")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Ranks]:
    """Return `ranks` on NCCL, rank r on CUDA device r; for tests marked `gpu(count)`."""
    yield from _pools("nccl")


def _pools(backend: str) -> Iterator[Ranks]:
    pools: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        return pools.setdefault(num_ranks, RankPool(num_ranks, backend=backend))

    yield pool_of
    for pool in pools.values():
        pool.close()
