"""Inside a started rank: join the world, then run one function after the other until the launcher lets go."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class WorldSetup:
    """What all ranks of a world have in common.

    Attributes:
        num_ranks: the world's size.
        backend: of torch.distributed; None starts no process group.
        device_type: "cpu" or "cuda"; see `run_ranks`.
        num_threads: of torch, in each rank.
        group_timeout_s: the default process group's own time limit, seconds.
        store_rank: the rank that hosts the TCPStore; None means the launching process.
    """

    num_ranks: int
    backend: str | None = "gloo"
    device_type: str = "cpu"
    num_threads: int = 1
    group_timeout_s: float = 600.0
    store_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank says of one call: a value, or the exception that ended it."""

    value: Any = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""


def rank_main(
    rank: int, setup: WorldSetup, port: int, listener: socket.socket | None, launcher: Connection, stacks_path: str
) -> None:
    """Serve the launcher; the first answer tells whether the world was joined."""
    _die_with_launcher()
    gc.freeze()  # what the fork server has imported is nobody's garbage: looking through it takes tenths of a second
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's: it ends every rank
    with open(stacks_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        _send(launcher, _answer(lambda: _join(rank, setup, port, listener)))
        while (message := _received(launcher)) is not None:
            _send(launcher, _answer(lambda message=message: _call(rank, message)))  # type: ignore[misc]
    if dist.is_initialized():
        dist.destroy_process_group()


def call_message(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the message that asks a rank for `fn(rank, *args)`.

    It carries the launcher's import path, which may have grown since the rank was started, and its warning filters, so
    that a warning is an error in a rank where it is one in the launcher.

    Raises:
        ValueError: if the function cannot be found by name, or an argument cannot be sent.
    """
    try:
        call = dumps((fn, args), _Pickler if _can_import_main() else _PicklerOfImported)
        return pickle.dumps((list(sys.path), pickle.dumps(warnings.filters), call))
    except (pickle.PicklingError, AttributeError, TypeError) as fault:
        raise ValueError(f"a rank needs a function of a module, and arguments that pickle: {fault}") from fault


def refuse_unreadable_main() -> None:
    """Refuse a program that came from standard input: every rank would look for a file of that name.

    Raises:
        ValueError: it did.
    """
    file = _file_of_main()
    if file is not None and not _can_import_main():
        raise ValueError(
            f"ranks import the program that starts them, and this one, {file}, is no file: save it as one, and put what"
            ' starts ranks under `if __name__ == "__main__":`'
        )


def _file_of_main() -> str | None:
    """The file that ranks would run to have the program's functions; None where there is none, as at a prompt."""
    return getattr(sys.modules["__main__"], "__file__", None)


def _can_import_main() -> bool:
    """Whether ranks have the functions of the program that starts them: of a module or of a file."""
    file = _file_of_main()
    return getattr(sys.modules["__main__"], "__spec__", None) is not None or (file is not None and Path(file).exists())


def dumps(value: Any, pickler: type[pickle.Pickler] | None = None) -> bytes:
    """Pickle a value; tensors in it go as plain bits and come back detached, contiguous and on the CPU."""
    buffer = io.BytesIO()
    (pickler or _Pickler)(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Torch's own way sends file descriptors of shared memory, which die with the rank that sent them."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (value.dtype, tuple(value.shape), bits.numpy())


class _PicklerOfImported(_Pickler):
    """Refuses functions and classes of a program that is no file."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__!r} came from a prompt, a notebook, standard input or -c, where no rank can import"
                " it: write it into a file and import it from there"
            )
        return super().reducer_override(value)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def _call(rank: int, message: bytes) -> Any:
    sys.path[:], filters, call = pickle.loads(message)
    with warnings.catch_warnings():
        warnings.filters[:] = pickle.loads(filters)  # type: ignore[index]
        fn, args = pickle.loads(call)
        return fn(rank, *args)


def _answer(call: Callable[[], Any]) -> Answer:
    try:
        return Answer(value=call())
    except BaseException as fault:  # noqa: BLE001  # whatever ends a call, SystemExit too, is told; the rank lives on
        return Answer(
            error_type=type(fault).__name__,
            message=str(fault),
            traceback="".join(traceback.format_exception(fault)),
        )


def _send(launcher: Connection, answer: Answer) -> None:
    try:
        payload = dumps(answer)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as fault:
        failure = f"the result of this rank cannot be sent: {fault}"
        payload = dumps(Answer(error_type="PicklingError", message=failure, traceback=failure))
    launcher.send_bytes(payload)


def _received(launcher: Connection) -> bytes | None:
    try:
        return launcher.recv_bytes()
    except EOFError:
        return None


def _join(rank: int, setup: WorldSetup, port: int, listener: socket.socket | None) -> None:
    torch.set_num_threads(setup.num_threads)
    device = take_device(rank, setup.num_ranks) if setup.device_type == "cuda" else None
    if setup.backend is None:
        return
    # Gloo otherwise asks the resolver for this host's name, which can be slow or wrong on a laptop.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    timeout = timedelta(seconds=setup.group_timeout_s)
    store = connect_store(port, listener)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=rank,
        world_size=setup.num_ranks,
        timeout=timeout,
        device_id=device if "nccl" in setup.backend else None,
    )


def take_device(rank: int, num_ranks: int) -> torch.device:
    """Make the CUDA device of a rank of this host the current one, and return it.

    Ranks share devices where there are too few (on a host with two, rank 3 of 4 gets `cuda:1`); torch is told so by an
    environment variable of its own.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise RuntimeError(f"rank {rank} of {num_ranks} needs a CUDA device, torch sees none")
    if num_devices < num_ranks:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch's own word for it
    device = torch.device("cuda", rank % num_devices)
    torch.cuda.set_device(device)
    return device


def connect_store(port: int, listener: socket.socket | None) -> dist.TCPStore:
    """Return the world's store: hosted here where a listening socket is given, else a client of it."""
    if listener is None:
        return dist.TCPStore(HOST, port, is_master=False)
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _die_with_launcher() -> None:
    """Make sure that no rank outlives the process that started it, whatever ends that process.

    A thread waits for the launcher's end. A stopped rank (SIGSTOP) runs no thread: on Linux the kernel ends it when the
    fork server goes, and that goes with the launcher once no rank holds its "alive" pipe open.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        raise RuntimeError("a rank runs in a process of its own, started by this module's launcher")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver  # no public way to let go of it
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None

    def end_with(process: Any) -> None:
        process.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with, args=(launcher,), daemon=True, name="end-with-launcher").start()
