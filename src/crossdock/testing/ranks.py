"""Starting ranks on one machine: for tests, for `verify`, and for programs that have no `torchrun`.

Three ways, by how long the ranks live:

    run_ranks     fresh ranks for one call
    RankPool      the same ranks for many calls
    start_ranks   fresh ranks for one call, which the caller may kill, pause and resume on the way

Every rank is a process of its own, forked from a server that has imported torch (a start costs tenths of a second),
with a default process group over all of them. No rank outlives the process that started it, however that one ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from ._rank import WorldSetup, call_message
from ._world import RankResult, World

Result = TypeVar("Result")

_GRACE_S = 2.0  # for the others to fail too, which tells more, before they are killed


class RanksFailed(RuntimeError):
    """A call did not return on every rank; the message has every failed rank's traceback, exit code or stacks.

    Attributes:
        results: by rank, how the call ended there.
    """

    def __init__(self, results: Sequence[RankResult]) -> None:
        """Describe the ranks that failed."""
        self.results = list(results)
        failed = [result for result in self.results if not result.ok]
        names = ", ".join(str(result.rank) for result in failed)
        super().__init__("\n\n".join([f"failed on rank {names} of {len(self.results)}", *map(str, failed)]))


def run_ranks(
    fn: Callable[..., Result],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    device_type: str | None = None,
    num_threads: int = 1,
) -> list[Result]:
    """Call `fn(rank, *args)` on fresh ranks and return the results by rank.

    Args:
        fn: a function of a module, so that a rank can import it.
        num_ranks: how many ranks, one process each.
        args: anything that pickles; tensors arrive detached and on the CPU, in results too.
        timeout_s: for the call, seconds; the start is not counted.
        backend: of the default process group; None makes no group.
        device_type: "cpu" or "cuda"; None means "cuda" with "nccl", else "cpu". On "cuda" the current device of rank r
            is the CUDA device r; if there are fewer, ranks share them by turns, which NCCL refuses and Gloo allows.
        num_threads: of torch, in each rank.

    Raises:
        RanksFailed: if a rank raised, died, or has not answered in time.
        ValueError: if `fn` or an argument cannot be sent, or the program that calls it came from standard input.

    Example:
        >>> run_ranks(pow, 3, 2, backend=None)  # pow(rank, 2)
        [0, 1, 4]
    """
    with RankPool(num_ranks, backend=backend, device_type=device_type, num_threads=num_threads) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


class RankPool:
    """Ranks that are started once and run many calls, one after the other.

    They start with the first call. After a call that failed or timed out they are killed, and the next call starts new
    ones: a fault never reaches into the next case. Process groups and other state that a call leaves behind in its
    ranks do stay; a function cleans up after itself.
    """

    def __init__(
        self, num_ranks: int, *, backend: str | None = "gloo", device_type: str | None = None, num_threads: int = 1
    ) -> None:
        """Take the arguments of `run_ranks`; nothing is started yet."""
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self._setup = WorldSetup(
            num_ranks=num_ranks,
            backend=backend,
            device_type=_device_type(backend, device_type),
            num_threads=num_threads,
        )
        self._world: World | None = None
        self._closed, self._in_use = False, threading.Lock()

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._setup.num_ranks

    @property
    def device_type(self) -> str:
        """Where the ranks' tensors are: "cpu" or "cuda"."""
        return self._setup.device_type

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while none are started."""
        return self._world.pids if self._world is not None else []

    def run(self, fn: Callable[..., Result], *args: Any, timeout_s: float = 60.0) -> list[Result]:
        """Call `fn(rank, *args)` on every rank and return the results by rank; see `run_ranks`."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this pool of ranks is running a call of another thread")
        try:
            if self._world is None:
                call_message(fn, args)  # what cannot be sent costs no start
                self._world = _joined_world(self._setup)
            if self._closed:  # perhaps while the ranks were starting
                raise RuntimeError("this pool of ranks is closed")
            self._world.ask(fn, args)
            results = self._world.collect(timeout_s, grace_s=_GRACE_S)
            if not all(result.ok for result in results):
                raise RanksFailed(results)
        except BaseException:  # an interrupt or a test's time limit too: ranks in the middle of a call are of no use
            self.kill()
            raise
        finally:
            self._in_use.release()
        return [result.value for result in results]

    def kill(self) -> None:
        """End the ranks now; the next call starts new ones."""
        if self._world is not None:
            self._world.kill()
            self._world = None

    def close(self) -> None:
        """Let the ranks leave their process group and end; the pool starts no others."""
        self._closed = True
        if self._world is not None:
            self._world.close()
            self._world = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


class StartedRanks:
    """Ranks in the middle of a call, which can be killed and paused. A context manager: at its end all are killed."""

    def __init__(self, world: World) -> None:
        """Watch over a world that has been asked something."""
        self._world = world

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._world.pids

    def kill(self, rank: int) -> None:
        """Kill a rank as the kernel does when memory runs out (SIGKILL)."""
        self._world.signal(rank, signal.SIGKILL)

    def pause(self, rank: int) -> None:
        """Stop a rank where it is (SIGSTOP); its sockets stay open and silent."""
        self._world.signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a paused rank go on (SIGCONT)."""
        self._world.signal(rank, signal.SIGCONT)

    def results(self, timeout_s: float = 60.0) -> list[RankResult]:
        """Wait up to `timeout_s` seconds for every rank that lives, and return by rank how the call ended there.

        Never raises for what a rank did. Ranks that have not answered are `silent`; call again for a later look.
        """
        return self._world.collect(timeout_s)

    def close(self) -> None:
        """Kill all ranks."""
        self._world.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def start_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str | None = "gloo",
    device_type: str | None = None,
    num_threads: int = 1,
    store_rank: int | None = None,
) -> StartedRanks:
    """Start `fn(rank, *args)` on fresh ranks and return at once, for tests of ranks that die or stop.

    Args:
        fn: as in `run_ranks`.
        num_ranks: as in `run_ranks`.
        args: as in `run_ranks`.
        backend: as in `run_ranks`.
        device_type: as in `run_ranks`.
        num_threads: as in `run_ranks`.
        store_rank: the rank that hosts the store of torch.distributed and takes it along when it dies. None: this
            process hosts it, as `torchrun`'s agent does.

    Raises:
        RanksFailed: if the ranks did not come together.
        ValueError: as `run_ranks`, or `store_rank` is no rank.
    """
    if store_rank is not None and not 0 <= store_rank < num_ranks:
        raise ValueError(f"store_rank must be in [0, {num_ranks}), got {store_rank}")
    call_message(fn, args)  # what cannot be sent costs no start
    world = _joined_world(
        WorldSetup(
            num_ranks=num_ranks,
            backend=backend,
            device_type=_device_type(backend, device_type),
            num_threads=num_threads,
            store_rank=store_rank,
        )
    )
    try:
        world.ask(fn, args)
    except BaseException:
        world.kill()
        raise
    return StartedRanks(world)


def _device_type(backend: str | None, asked: str | None) -> str:
    needs_gpus = backend is not None and "nccl" in backend
    if asked is None:
        return "cuda" if needs_gpus else "cpu"
    if asked not in ("cpu", "cuda") or (needs_gpus and asked == "cpu"):
        raise ValueError(f'device_type must be "cpu" or "cuda", and "cuda" with NCCL; got {asked!r} with {backend!r}')
    return asked


def _joined_world(setup: WorldSetup) -> World:
    world = World(setup)
    if not all(result.ok for result in world.joined):
        world.kill()
        raise RanksFailed(world.joined)
    return world
