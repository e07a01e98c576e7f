"""The demo from start to end: train, prove, tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from ..output import spinner, stdout_console
from ..torchrun import world_size_of_torchrun
from . import report
from .claims import Claim
from .launch import Ranks, started_ranks, torchrun_ranks
from .prove_ragged import prove_ragged
from .prove_sharded import TENSOR_PARALLEL, prove_sharded
from .prove_split import prove_split
from .prove_sync_free import prove_sync_free
from .settings import Job
from .train import train

# Each with a number of ranks that it runs on any multiple of.
_PROOFS = (
    ("one rank against many", prove_split, 2),
    ("any number of tokens", prove_ragged, 2),
    ("training with a row capacity", prove_sync_free, 2),
    ("sharded sequences", prove_sharded, 2 * TENSOR_PARALLEL),
)


def conduct(job: Job, num_ranks: int, copy_report_to: Path | None) -> bool:
    """Run all of it; True if every claim held. Under torchrun every rank calls it, and rank 0 tells."""
    start = time.perf_counter()
    console = stdout_console()
    with torchrun_ranks() if world_size_of_torchrun() is not None else started_ranks(num_ranks) as ranks:
        console.quiet = not ranks.leads
        report.introduce(console, job, num_ranks)
        trained = ranks.run(train, job)
        claims = [*trained.claims, *_prove(console, ranks, job)]
    if ranks.leads:
        with console.status("drawing", spinner=spinner()):
            report.save(job, trained, claims, time.perf_counter() - start, copy_report_to)
        report.tell(console, job, trained, claims, time.perf_counter() - start)
    return all(claim.holds for claim in claims)


def _prove(console: Console, ranks: Ranks, job: Job) -> Iterator[Claim]:
    """Run each proof on the ranks that trained, or on others of this machine where their number does not fit."""
    for what, prove, num_ranks in _PROOFS:
        with console.status(f"proving: {what}", spinner=spinner()):
            if ranks.size % num_ranks == 0:
                yield from ranks.run(prove, job)
            elif ranks.leads:
                with started_ranks(num_ranks) as others:
                    yield from others.run(prove, job)
