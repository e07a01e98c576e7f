"""Every opened dispatcher answers one question, at any time: which call this rank is in.

A thread listens on a socket of its own, so a peer gets an answer while this rank computes, waits in a collective or
has failed; a rank that is dead refuses the connection and one that is stopped stays silent. Diagnosis needs nothing
else: neither the transport that failed nor the rendezvous store, whose host may be the dead one.

A peer may bring a verdict with its question. The first one stays, and every answer carries it: that is how ranks agree
on who was at fault, and how one that comes later learns of it, when the others may be gone.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from .addresses import LOOPBACK, Address

QUERY_TIMEOUT_S = 1.0
_FIND_S = 1.5  # how long a peer that is silent is tried again when a dispatcher opens
_FIND_TIMEOUT_S = 0.5
_MAX_QUESTION_BYTES = 1 << 20
_PAUSE_S = 0.05
_TELL_S = 0.2  # to reach a rank that may be stopped: its host answers for it


@dataclass
class CallState:
    """What this rank is doing, written by the dispatcher and read by the answering thread.

    Attributes:
        phase: "idle", "in_call", "diagnosing", "faulted" (by peers), "failed" (by itself) or "closed".
        call: number of the call it is in, or of the last one it finished; -1 is the opening, -2 is before that.
        words: the fingerprint of that call.
        timed_out: whether it has waited for the whole `timeout_s` in that call.
        verdict: who was blamed for this dispatcher's first fault, once known.

    """

    phase: str = "idle"
    call: int = -2
    operation: str = ""
    layer: str = ""
    words: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)
    timed_out: bool = False
    verdict: dict[str, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def enter(self, call: int, operation: str, layer: str, words: tuple[int, ...]) -> None:
        """Begin a call."""
        self.call, self.operation, self.layer, self.words = call, operation, layer, words
        self.since = time.monotonic()
        self.move_to("in_call")

    def move_to(self, phase: str) -> None:
        """Enter a phase; a fault that a watch has found meanwhile is not forgotten."""
        if self.phase not in ("diagnosing", "faulted", "failed") or phase not in ("idle", "in_call"):
            self.phase = phase

    def propose(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Take a verdict unless there is one already; returns the one that stays."""
        with self._lock:
            if self.verdict is None:
                self.verdict = verdict
            return self.verdict

    def answer(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "phase": self.phase,
            "call": self.call,
            "operation": self.operation,
            "layer": self.layer,
            "words": list(self.words),
            "for_s": round(time.monotonic() - self.since, 3),
            "timed_out": self.timed_out,
            "verdict": self.verdict,
        }


class StatusServer:
    """Answers `ask` from daemon threads until closed. Owns its socket and nothing else."""

    def __init__(self, state: CallState, hosts: Sequence[str]) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("", 0), backlog=128)
        self.address = Address(tuple(hosts), self._socket.getsockname()[1], secrets.token_hex(8))
        self._closing = threading.Event()
        arguments = (self._socket, self._closing, state, self.address.token)
        self._thread = threading.Thread(target=_serve, args=arguments, name="crossdock-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; returns at once when already closed."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:  # wakes accept(), and unlike shutdown() does not end the listening of the parent of a forked child
            socket.create_connection((LOOPBACK, self.address.port), timeout=QUERY_TIMEOUT_S).close()
        except OSError:  # no loopback, or no descriptor left
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=QUERY_TIMEOUT_S)
        self._socket.close()


def _serve(listener: socket.socket, closing_: threading.Event, state: CallState, token: str) -> None:
    while not closing_.is_set():
        try:
            connection, _ = listener.accept()
        except OSError:  # out of descriptors for a moment, or closed
            closing_.wait(_PAUSE_S)
            continue
        # A thread each: whoever connects and sends nothing must not keep the next one from its answer.
        reply = threading.Thread(target=_reply, args=(connection, state, token), name="crossdock-reply", daemon=True)
        try:
            reply.start()
        except RuntimeError:  # no new threads while the interpreter ends
            _reply(connection, state, token)


def _reply(connection: socket.socket, state: CallState, token: str) -> None:
    with closing(connection), suppress(OSError, ValueError, KeyError, TypeError):
        connection.settimeout(QUERY_TIMEOUT_S)
        with connection.makefile("rb") as stream:
            question = json.loads(stream.readline(_MAX_QUESTION_BYTES))
        if question["token"] != token:
            return
        if question["verdict"] is not None:
            state.propose(question["verdict"])
        connection.sendall(json.dumps(state.answer()).encode())


def ask(address: Address, verdict: dict[str, Any] | None = None) -> dict[str, Any]:
    """A peer's `CallState.answer()`, `{"phase": "dead"}`, or `{"phase": "silent"}` with a reason.

    A `verdict` is proposed to it; the one that stays is in the answer.
    """
    refused, reason = 0, "it has no address"
    for host in address.hosts:
        try:
            return _ask_host(host, address, verdict, QUERY_TIMEOUT_S / len(address.hosts))
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            refused += 1
        except (OSError, ValueError) as error:
            reason = f"it does not answer (stopped, or its host cannot be reached: {error})"
    if refused == len(address.hosts):
        return {"phase": "dead"}
    return {"phase": "silent", "reason": reason}


def tell(address: Address, verdict: dict[str, Any]) -> None:
    """Leave a verdict with a rank that does not answer: one that was stopped finds it when it goes on."""
    for host in address.hosts:
        with suppress(OSError), socket.create_connection((host, address.port), timeout=_TELL_S) as connection:
            connection.sendall(_question(address, verdict))
            return


def find_all(addresses: Sequence[Address]) -> list[Address | None]:
    """Every address with the one host that answers; None where none does."""
    deadline = time.monotonic() + _FIND_S
    with ThreadPoolExecutor(max_workers=min(max(len(addresses), 1), 32), thread_name_prefix="crossdock-find") as pool:
        return list(pool.map(lambda address: _find(address, deadline), addresses))


def _find(address: Address, deadline: float) -> Address | None:
    """Try again where nothing was heard; where every host refuses, the process has ended."""
    while True:
        refused = 0
        for host in address.hosts:
            try:
                _ask_host(host, address, None, _FIND_TIMEOUT_S)
                return Address((host,), address.port, address.token)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                refused += 1
            except (OSError, ValueError):
                continue
        if refused == len(address.hosts) or time.monotonic() > deadline:
            return None


def _ask_host(host: str, address: Address, verdict: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    with socket.create_connection((host, address.port), timeout=timeout_s) as connection:
        connection.sendall(_question(address, verdict))
        with connection.makefile("rb") as stream:
            answer = stream.read()
    if not answer:
        raise ConnectionResetError("closed without an answer")
    result: dict[str, Any] = json.loads(answer)
    return result


def _question(address: Address, verdict: dict[str, Any] | None) -> bytes:
    return (json.dumps({"token": address.token, "verdict": verdict}) + "\n").encode()
