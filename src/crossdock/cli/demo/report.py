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
from rich.text import Text

import crossdock as cd

from ..output import can_write, counted, print_prose, print_whole
from . import pictures
from .claims import Claim
from .layers import told_apart
from .progress import imbalance
from .prove_checkpoint import FILE_NAME
from .settings import Job
from .train import Trained

LEGEND = (
    "calls: dispatches, each of all ranks together; rows: that they brought to all ranks' experts; busiest: expert,"
    " over the mean; capacity: rows of a rank, and the most of it that was wanted; MB: rows that all ranks sent to"
    " others, and those that the last combine with gradients keeps for its backward"
)
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
    layers, steps = counted(sizes.num_layers, "MoE layer"), counted(job.steps, "step")
    told = Text("crossdock demo", "bold").append(
        f": {layers} of {sizes.num_experts} experts (top {sizes.top_k}) on {counted(num_ranks, 'rank')},"
        f" {steps} of {num_ranks * job.num_sequences * sizes.seq_len:,} bytes of text",
        "not bold",
    )
    print_prose(console, told)


def tell(console: Console, job: Job, trained: Trained, claims: Sequence[Claim], seconds: float) -> None:
    """Print what was shown, and where the files are."""
    table = Table("what was shown", "how", "", "result", title="", show_lines=True, expand=False)
    yes, no = ("✓", "✗") if can_write("✓✗") else ("yes", "NO")
    for claim in claims:
        mark = Text(yes, "green") if claim.holds else Text(no, "bold red")
        table.add_row(Text(claim.claim), Text(claim.how), mark, Text(claim.result))
    console.print(table)
    console.print()
    print_whole(console, layers_table(claims))
    print_prose(console, LEGEND, "dim")
    speed, last = statistics.median(trained.tokens_per_s), trained.tokens_per_expert[-1]
    loads = ", ".join(f"{imbalance(load):.2f}" for load in last)
    print_prose(
        console,
        f"{trained.num_parameters / 1e6:.1f} M parameters, {speed:,.0f} tokens/s (median), backend {trained.backend},"
        f" {trained.sent_bytes / 1e6:.1f} MB a step sent by rank 0; busiest expert over the mean at the end: {loads}",
    )
    files = ", ".join((LOSS, EXPERT_LOAD, FILE_NAME, REPORT))
    print_prose(console, f"Written to {job.out}/: {files}")
    failed = sum(not claim.holds for claim in claims)
    verdict = f"{failed} of {len(claims)} did not hold" if failed else f"all {len(claims)} hold"
    told = Text(verdict, "bold red" if failed else "green").append(f", after {seconds:.0f} s", "default not bold")
    print_prose(console, told)


def layers_table(claims: Sequence[Claim]) -> Table:
    """What every layer of the runs did, over all ranks."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("layer", "calls", "rows", "dropped", "busiest", "capacity", "MB sent", "MB kept"):
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    lines = [line for claim in claims for line in claim.layers]
    for run in dict.fromkeys(line.run for line in lines):
        table.add_row(Text(run, "bold"))
        of_run = [line for line in lines if line.run == run]
        for name, line in zip(told_apart([line.layer for line in of_run]), of_run, strict=True):
            dropped = f"{line.dropped:,} in {line.overflows:,}" if line.dropped else "none"
            counts = (f"{line.dispatches:,}", f"{line.rows:,}", dropped, f"{line.imbalance:.2f}")
            num_bytes = (f"{number / 1e6:.1f}" for number in (line.sent_rows_bytes, line.saved_bytes))
            table.add_row(f"  {name}", *counts, line.room, *num_bytes)
    return table
