"""Whether the ranks of a group reach one another: tried out, with a dispatcher of a usual size on every backend."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import crossdock
from crossdock.errors import ConfigError, CrossdockError, PeerTimeout
from crossdock.testing import RankPool, RanksFailed, take_device

from .failures import line_of
from .finding import Finding
from .torchrun import num_ranks_here, ranks_of_torchrun

_TIMEOUT_S = 20.0  # of one wait
_MOST_S = 180.0
_MISHAPS = Exception  # what a backend of another package may come to: it takes no other one along
_AUTO = "auto"
_NUM_EXPERTS, _TOP_K, _HIDDEN_DIM = 8, 8, 2048  # of a rank, of a token, of a row


class Refusal(NamedTuple):
    """Why a backend cannot serve; `is_echo` if another rank's refusal is why, `is_tried` if it was opened in vain."""

    is_echo: bool
    is_tried: bool
    reason: str


class Facts(NamedTuple):
    """What one rank has found out.

    Attributes:
        host: its name, and which boot of it this is.
        device: where its rows live.
        store_ms: how long the rendezvous store takes to answer.
        cut_off: ranks of this host whose GPU cannot be reached from this one's.
        refused: why a dispatcher cannot be opened, by backend and for "auto"; None where it was.
        bytes_by_backend: storage for communication of those that were opened.
        chosen: the backend that "auto" took; None if it could not be opened.
    """

    host: str
    device: str
    store_ms: float
    cut_off: list[int]
    refused: dict[str, Refusal | None]
    bytes_by_backend: dict[str, int]
    chosen: str | None = None


class Reached(NamedTuple):
    """What ranks have found out of each other.

    Attributes:
        reports: whether this process is the one that tells of it.
        num_ranks: how many there are.
        facts: by rank; empty where they failed, or do not report.
        failure: how they failed.
    """

    reports: bool
    num_ranks: int
    facts: list[Facts]
    failure: str = ""

    @property
    def findings(self) -> list[Finding]:
        """All that there is to tell."""
        failed = [Finding("ranks", "all", "broken", self.failure)] if self.failure else []
        return [*failed, *(findings_of(self.facts) if self.facts else ())]

    @property
    def choice(self) -> dict[str, Any]:
        """What "auto" takes on these ranks, and why others cannot serve, as plain JSON values."""
        experts = _NUM_EXPERTS * self.num_ranks
        sample = f"{self.num_ranks} ranks, {experts} experts, top {_TOP_K}, hidden_dim {_HIDDEN_DIM}, bfloat16"
        chosen = {each.chosen for each in self.facts}
        names = [name for name in self.facts[0].refused if name != _AUTO] if self.facts else []
        return {
            "sample": sample,
            "chosen": chosen.pop() if len(chosen) == 1 else None,
            "candidates": {name: why[1] if (why := _refusal_of(self.facts, name)) else None for name in names},
        }


def look_at_ranks(asked: int | None) -> Reached | None:
    """Start `asked` ranks, or take those of torchrun, and let them find out; None where there is nothing to start.

    Raises:
        ConfigError: a number of ranks that cannot work.
    """
    by_torchrun = ranks_of_torchrun(asked)
    num_ranks = by_torchrun if by_torchrun is not None else asked
    if num_ranks is None:
        return None
    if num_ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, got {num_ranks}: leave it out for one rank")
    device_type = "cuda" if torch.cuda.device_count() >= num_ranks_here(num_ranks) else "cpu"
    try:
        if by_torchrun is None:
            with RankPool(num_ranks, backend="gloo", device_type=device_type) as pool:
                facts = pool.run(_find_out, device_type, timeout_s=_MOST_S)
        else:
            facts = _of_torchrun(device_type)
    except RanksFailed as failure:
        return Reached(True, num_ranks, [], line_of(failure))
    return Reached(bool(facts), num_ranks, facts)


def _of_torchrun(device_type: str) -> list[Facts]:
    """All ranks' facts on rank 0, nothing on the others."""
    if device_type == "cuda":
        take_device(int(os.environ.get("LOCAL_RANK", "0")), num_ranks_here(int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=timedelta(seconds=_MOST_S))
    try:
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, _find_out(dist.get_rank(), device_type))
        return facts if dist.get_rank() == 0 else []
    finally:
        dist.destroy_process_group()


def _find_out(rank: int, device_type: str) -> Facts:
    """Collective over the default group."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (host, device.index))
    refused, bytes_by_backend, chosen = _open_each(device)
    cut_off = [
        peer
        for peer, (there, index) in enumerate(places)
        if there == host
        and index not in (None, device.index)
        and not torch.cuda.can_device_access_peer(device, torch.device("cuda", index))
    ]
    return Facts(host, str(device), _time_store(rank), cut_off, refused, bytes_by_backend, chosen)


def _time_store(rank: int) -> float:
    store = dist.distributed_c10d._get_default_store()
    start = time.monotonic()
    store.set(f"doctor/{rank}", "here")
    store.get(f"doctor/{rank}")
    return (time.monotonic() - start) * 1e3


def _open_each(device: torch.device) -> tuple[dict[str, Refusal | None], dict[str, int], str | None]:
    """Why not and how large, by name, and what "auto" took."""
    config = crossdock.DispatcherConfig(
        num_experts=_NUM_EXPERTS * dist.get_world_size(),
        top_k=_TOP_K,
        hidden_dim=_HIDDEN_DIM,
        dtype=torch.bfloat16,
        num_max_tokens_per_rank=4096,
        timeout_s=_TIMEOUT_S,
    )
    mine = {candidate.name: candidate.why_not for candidate in crossdock.explain(config, device=device).candidates}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    names = dict.fromkeys(name for each in by_rank for name in each)
    refused: dict[str, Refusal | None] = {
        name: None if why_not is None else Refusal(False, False, why_not)
        for name in names
        for why_not in [mine.get(name, "it is not installed there")]
    }
    usable = [name for name in names if all(each.get(name, "") is None for each in by_rank)]
    bytes_by_backend, chosen = {}, None
    for name in [*usable, _AUTO]:
        refused[name], opened = _open(config, name, device)
        if opened is not None:
            bytes_by_backend[name] = opened[1]
            chosen = opened[0] if name == _AUTO else None
    return refused, bytes_by_backend, chosen


def _open(
    config: crossdock.DispatcherConfig, name: str, device: torch.device
) -> tuple[Refusal | None, tuple[str, int] | None]:
    """Why a dispatcher cannot be opened; else its backend, and bytes of its storage. Collective."""
    met = False
    try:
        with crossdock.TokenDispatcher(config, None, name, device=device) as dispatcher:
            met = True
            dist.barrier()  # nobody closes it while another rank still connects
            return None, (dispatcher.backend_name, dispatcher.workspace_bytes)
    except _MISHAPS as error:
        if not met:
            dist.barrier()
        own = isinstance(error, CrossdockError | OSError | RuntimeError)
        reason = str(error) if own else f"{type(error).__name__}: {error}"
        return Refusal(isinstance(error, PeerTimeout), True, reason), None


def findings_of(facts: list[Facts]) -> Iterator[Finding]:
    """What that of all ranks comes to, by rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        ranks_of.setdefault(each.host, []).append(rank)
    where = ", ".join(f"ranks {ranks} on {host.partition(' ')[0]}" for host, ranks in ranks_of.items())
    yield Finding("ranks", "one host", "ok" if len(ranks_of) == 1 else "absent", where)
    slowest = max(each.store_ms for each in facts)
    yield Finding("ranks", "store", "ok", f"answers every rank, the slowest in {slowest:.1f} ms")
    if all(each.device != "cpu" for each in facts):
        pairs = [f"{rank} to {peer}" for rank, each in enumerate(facts) for peer in each.cut_off]
        told = f"not from rank {', '.join(pairs)}" if pairs else "between every pair of ranks on a host"
        yield Finding("ranks", "peer access", "absent" if pairs else "ok", told)
    yield from _of_backends(facts)


def _refusal_of(facts: list[Facts], name: str) -> tuple[Refusal, str] | None:
    """Why a backend cannot serve, and that in words: of the first rank with a reason of its own; None if it can."""
    refusals = [(refusal, rank) for rank, each in enumerate(facts) if (refusal := each.refused.get(name)) is not None]
    if not refusals:
        return None
    refusal, rank = min(refusals, key=lambda each: (each[0].is_echo, each[1]))
    return refusal, f"on rank {rank}: {refusal.reason}"


def _of_backends(facts: list[Facts]) -> Iterator[Finding]:
    for name in facts[0].refused:
        if why := _refusal_of(facts, name):
            yield Finding("ranks", name, "broken" if why[0].is_tried else "absent", why[1])
        elif name == _AUTO:
            yield Finding("ranks", name, "ok", f"takes {facts[0].chosen} on these ranks")
        else:
            storage = f"{facts[0].bytes_by_backend[name] / 2**20:.0f} MiB of storage a rank"
            yield Finding("ranks", name, "ok", f"opened on {len(facts)} ranks, {storage}")
