"""The launcher's side of a world of ranks: start them, ask them, and leave none behind."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ._rank import HOST, Answer, WorldSetup, call_message, connect_store, rank_main, refuse_unreadable_main

_GRACE_S = 2.0  # for the others, once a rank has not come up
_START_S = 60.0  # importing torch from a cold disk is most of it
_END_S = 5.0
_STACKS_S = 1.0
_STACKS_PAUSE_S = 0.1
_UNGUARDED = 79  # exit code of a rank that was about to start ranks
# Imported once in the fork server: what every rank needs that opens a dispatcher (torch._dynamo takes a second), and
# what else the launcher has. None of them starts a thread pool or touches CUDA.
_NEEDED = ("torch", "torch._dynamo", "torch.distributed", "numpy", "crossdock")
_PERHAPS_NEEDED = ("pytest", "hypothesis", "typer", "rich")


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How a call ended on one rank: exactly one of a value, an exception, the rank's death, or silence.

    Attributes:
        rank: the rank.
        value: what the function returned; tensors are detached and on the CPU.
        error_type: the exception's class name, else "".
        message: the exception's text, else "".
        traceback: the exception's traceback as printed, else "".
        exit_code: of a rank that died without an answer; negative is a signal, as in `multiprocessing`. Else None.
        silent: True if the rank lives and has not answered.
        stacks: a silent rank's stacks, as `faulthandler` prints them; "" if it is stopped or was not asked.
    """

    rank: int
    value: Any = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    silent: bool = False
    stacks: str = ""

    @property
    def ok(self) -> bool:
        """True if the function returned."""
        return not self.error_type and self.exit_code is None and not self.silent

    def __str__(self) -> str:
        """Return a sentence, and the traceback or the stacks under it."""
        if self.ok:
            return f"rank {self.rank} returned"
        if self.error_type:
            return f"rank {self.rank} raised {self.error_type}: {self.message}\n{self.traceback}"
        if self.exit_code is not None:
            return f"rank {self.rank} died: {_exit_text(self.exit_code)}"
        return f"rank {self.rank} has not answered\n{self.stacks}"


class World:
    """Ranks on this machine and the store they met through. Not reusable after `kill` or `close`."""

    def __init__(self, setup: WorldSetup) -> None:
        """Start the ranks and wait until each has joined or failed to; the results of that are in `joined`."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # a rank that imports the user's script
            os._exit(_UNGUARDED)
        refuse_unreadable_main()
        self.setup = setup
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._answers: dict[int, RankResult] = {}
        self._store: dist.TCPStore | None = None
        self._stacks = tempfile.TemporaryDirectory(prefix="crossdock-ranks-")
        # Before multiprocessing's own clean-up, which would wait for a stopped rank for ever.
        atexit.register(self.kill)
        try:
            self._store = self._start()
            self.joined = self.collect(_START_S, grace_s=_GRACE_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    def ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Have every rank call `fn(rank, *args)`; `collect` brings the answers."""
        message = call_message(fn, args)
        self._answers.clear()
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:  # it died since its last answer
                self._answers[rank] = self._death(rank)

    def collect(self, timeout_s: float, *, grace_s: float | None = None, stacks: bool = True) -> list[RankResult]:
        """Wait for the ranks' answers to the last `ask`.

        Args:
            timeout_s: how long to wait for all of them, seconds.
            grace_s: how long to wait for the rest once a rank has failed; None is all of `timeout_s`.
            stacks: ask ranks that are silent at the end for their stacks.

        Returns:
            By rank. Calling it again brings the answers that have come since.
        """
        deadline = time.monotonic() + timeout_s
        while waiting := {self._pipes[rank]: rank for rank in self._silent_ranks()}:
            if grace_s is not None and any(not result.ok for result in self._answers.values()):
                deadline, grace_s = min(deadline, time.monotonic() + grace_s), None
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                self._answers[rank] = self._receive(rank)
        silent = {rank: "" for rank in self._silent_ranks()}
        if stacks and silent:
            silent = self._stacks_of(silent)
        return [
            self._answers[rank] if rank in self._answers else RankResult(rank=rank, silent=True, stacks=silent[rank])
            for rank in range(self.setup.num_ranks)
        ]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank; nothing happens if it is dead."""
        if self._processes[rank].is_alive():
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """Let the ranks end by themselves, then kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now, stopped ones too."""
        atexit.unregister(self.kill)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        for pipe in self._pipes:
            pipe.close()
        self._stacks.cleanup()
        self._store = None

    def _start(self) -> dist.TCPStore | None:
        """Start the processes; return the store if this process hosts it."""
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.setup.num_ranks):
                self._start_rank(rank, port, listener if rank == self.setup.store_rank else None)
            hosts_store = self.setup.store_rank is None and self.setup.backend is not None
            return connect_store(port, listener) if hosts_store else None

    def _start_rank(self, rank: int, port: int, listener: socket.socket | None) -> None:
        ours, theirs = _context().Pipe()
        self._pipes.append(ours)
        with theirs:  # closed here once started: the rank's death is then the end of the pipe
            process = _context().Process(
                target=rank_main,
                args=(rank, self.setup, port, listener, theirs, str(self._stacks_path(rank))),
                name=f"rank {rank}",
                daemon=True,
            )
            with _interrupts_held_back():
                process.start()
                self._processes.append(process)

    def _receive(self, rank: int) -> RankResult:
        try:
            answer: Answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return self._death(rank)
        return RankResult(rank=rank, **vars(answer))

    def _death(self, rank: int) -> RankResult:
        self._processes[rank].join(_END_S)
        exit_code = self._processes[rank].exitcode
        return RankResult(rank=rank, silent=exit_code is None, exit_code=exit_code)

    def _silent_ranks(self) -> list[int]:
        return [rank for rank in range(self.setup.num_ranks) if rank not in self._answers]

    def _stacks_path(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"rank{rank}.txt"

    def _stacks_of(self, ranks: dict[int, str]) -> dict[int, str]:
        for rank in ranks:
            if self._stacks_path(rank).exists():  # only then has it a handler; the signal's default is to kill
                self.signal(rank, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        before: list[str] = []
        while time.monotonic() < deadline:
            texts = [self._stacks_text(rank) for rank in ranks]
            if all(texts) and texts == before:  # they have stopped growing: a handler writes line by line
                break
            before = texts
            time.sleep(_STACKS_PAUSE_S)
        return {rank: self._stacks_text(rank) for rank in ranks}

    def _stacks_text(self, rank: int) -> str:
        path = self._stacks_path(rank)
        return path.read_text() if path.exists() else ""


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C come at the end of the `with`, and to nobody who is started in it: it is the launcher's.

    A fork server that still imports what it shall have, and a rank that is not yet one, would tell of it in tracebacks.
    A launcher that left in the middle of a start would not know whom to end.
    """
    resource_tracker.ensure_running()  # it would take the block away where it has to be started
    held: list[int] = []
    # Only the main thread is interrupted, also by a signal that the system gives to another one.
    is_main = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if is_main else None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if is_main:
            signal.signal(signal.SIGINT, handler)
            if held:
                signal.raise_signal(signal.SIGINT)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_NEEDED, *(name for name in _PERHAPS_NEEDED if name in sys.modules)])
    return context


def _exit_text(exit_code: int) -> str:
    if exit_code == _UNGUARDED:
        return (
            "it imported the script that starts it, which started ranks again: what starts them belongs under"
            ' `if __name__ == "__main__":`'
        )
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}"
