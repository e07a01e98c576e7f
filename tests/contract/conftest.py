"""The backends under contract, and where each of them runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crossdock.testing import PoolRunner, Runner, ThreadRunner
from tests.conftest import Ranks

# backend -> group sizes of its contract tests. A new backend is a new row.
BACKENDS = {"local": (1,), "loopback": (1, 2, 4), "all_to_all": (1, 2, 4), "symmetric": (2,)}
# Further sizes, for the tests alone that ask for them: there the kernels are interpreted, which takes long.
FURTHER = {"symmetric": (4,)}
IN_THREADS = ("local", "loopback")

# Lent as the type of the `on` fixture: `on("all_to_all", 4)` calls functions on 4 ranks.
On = Callable[[str, int], Runner]


@pytest.fixture(scope="session")
def on(ranks: Ranks) -> On:
    """Return a function of backend and number of ranks: what calls functions on a seat of every rank."""

    def runner(backend: str, ep_size: int) -> Runner:
        return ThreadRunner(ep_size, backend) if backend in IN_THREADS else PoolRunner(ranks(ep_size), backend)

    return runner


def every_backend(*ep_sizes: int, further: bool = False) -> pytest.MarkDecorator:
    """Run a test with `backend` and `ep_size` for every backend that has some of these sizes; all without any.

    With `further` on those too that have them among their further sizes.
    """
    sizes_of = {name: (*sizes, *(FURTHER.get(name, ()) if further else ())) for name, sizes in BACKENDS.items()}
    pairs = [(name, size) for name, sizes in sizes_of.items() for size in sizes if not ep_sizes or size in ep_sizes]
    return pytest.mark.parametrize(("backend", "ep_size"), pairs, ids=[f"{name}-{size}" for name, size in pairs])
