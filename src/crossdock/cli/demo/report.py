"""What a run leaves behind and says at its end: a table, pictures and a JSON report."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import crossdock as cd

from . import pictures
from .claims import Claim
from .progress import imbalance
from .prove_checkpoint import FILE_NAME
from .settings import Job
from .train import Trained

LOSS, EXPERT_LOAD, REPORT = "loss.png", "expert_load.png", "report.json"


def save(job: Job, trained: Trained, claims: Sequence[Claim], seconds: float, copy_to: Path | None) -> None:
    """Write the pictures and the report into `job.out`, and the report once more to `copy_to`."""
    pictures.save_loss(job.out / LOSS, trained)
    pictures.save_expert_load(job.out / EXPERT_LOAD, trained)
    content = json.dumps(as_dict(job, trained, claims, seconds), indent=1) + "\n"
    for path in (job.out / REPORT, copy_to):
        if path is not None:
            path.write_text(content)


def as_dict(job: Job, trained: Trained, claims: Sequence[Claim], seconds: float) -> dict[str, Any]:
    """The whole run as plain JSON values."""
    settings = asdict(job) | {"data": None if job.data is None else str(job.data), "out": str(job.out)}
    training = {name: value for name, value in asdict(trained).items() if name != "claims"}
    return {
        "all_hold": all(claim.holds for claim in claims),
        "claims": [asdict(claim) for claim in claims],
        "seconds": round(seconds, 1),
        "settings": settings,
        "training": training,
        "machine": machine(),
        "versions": {"crossdock": cd.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "numpy", "matplotlib", "safetensors")},
    }


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def introduce(console: Console, job: Job, num_ranks: int) -> None:
    """Say what is about to happen."""
    sizes = job.sizes
    console.print(
        f"[bold]crossdock demo[/]: {sizes.num_layers} MoE layers of {sizes.num_experts} experts (top {sizes.top_k}) on"
        f" {num_ranks} ranks, {job.steps} steps of {num_ranks * job.num_sequences * sizes.seq_len:,} bytes of text",
        soft_wrap=True,
    )


def tell(console: Console, job: Job, trained: Trained, claims: Sequence[Claim], seconds: float) -> None:
    """Print what was shown, and where the files are."""
    table = Table("what was shown", "how", "", "result", title="", show_lines=True, expand=False)
    for claim in claims:
        mark = "[green]✓[/]" if claim.holds else "[bold red]✗[/]"
        table.add_row(claim.claim, claim.how, mark, claim.result)
    console.print(table)
    console.print(_layers(claims))
    speed, last = statistics.median(trained.tokens_per_s), trained.tokens_per_expert[-1]
    loads = ", ".join(f"{imbalance(load):.2f}" for load in last)
    console.print(
        f"{trained.num_parameters / 1e6:.1f} M parameters, {speed:,.0f} tokens/s (median), backend {trained.backend},"
        f" {trained.sent_bytes / 1e6:.1f} MB a step sent by rank 0; busiest expert over the mean at the end: {loads}",
        soft_wrap=True,
    )
    files = ", ".join((LOSS, EXPERT_LOAD, FILE_NAME, REPORT))
    console.print(f"Written to {job.out}/: {files}", soft_wrap=True)
    failed = sum(not claim.holds for claim in claims)
    verdict = f"[bold red]{failed} of {len(claims)} did not hold[/]" if failed else f"[green]all {len(claims)} hold[/]"
    console.print(f"{verdict}, after {seconds:.0f} s")


def _layers(claims: Sequence[Claim]) -> Table:
    """What every layer of the runs did, over all ranks."""
    table = Table("run", "layer", "calls", "rows", "dropped", "busiest", "capacity", "MB", box=box.SIMPLE)
    table.caption = (
        "dispatches of all ranks; busiest expert over the mean; the most of a capacity that was wanted; rows sent to"
        " other ranks, and kept for a backward, in MB"
    )
    for line in (line for claim in claims for line in claim.layers):
        dropped = f"{line.dropped:,} in {line.overflows:,}" if line.dropped else "none"
        capacity = "exact" if line.fill is None else f"{line.capacity:,}, {line.fill:.0%}"
        counts = (f"{line.dispatches:,}", f"{line.rows:,}", dropped, f"{line.imbalance:.2f}")
        num_bytes = f"{line.sent_rows_bytes / 1e6:.1f}, {line.saved_bytes / 1e6:.1f}"
        table.add_row(line.run, line.layer, *counts, capacity, num_bytes)
    return table
