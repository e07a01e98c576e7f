"""What `verify` says at its end: a table by check group, and a JSON record of every cell."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from crossdock.testing import CellResult

from ..environment import describe_run
from ..output import counted, print_prose, stdout_console
from ..paths import write_record
from .plan import Plan
from .run import Finished

_NOT_SAID: Final = re.compile(r"\(.*?\)|^it needs |'")  # arguments of a row capacity: its kind says enough


def report(plan: Plan, finished: Finished) -> bool:
    """Print the table and write the record, if one was asked for; False if that could not be done."""
    console = stdout_console()
    console.print(_table(plan, finished))
    counts = Counter(result.status for result in finished.results)
    verdict = "conforms" if finished.all_passed else "does NOT conform"
    if finished.all_passed and plan.only is not None:
        verdict += " as far as --only goes"
    print_prose(
        console,
        f"{plan.backend} on {plan.where} {verdict}: {counted(counts['passed'], 'check')} passed,"
        f" {counts['skipped']} skipped, {counts['failed']} failed in {finished.seconds:.0f} s",
        "bold green" if finished.all_passed else "bold red",
    )
    content = json.dumps(as_dict(plan, finished), indent=1) + "\n"
    return plan.json is None or write_record("verify", "--json", plan.json, content)


def as_dict(plan: Plan, finished: Finished) -> dict[str, Any]:
    """The whole run as plain JSON values."""
    return {
        "all_passed": finished.all_passed,
        "backend": plan.backend,
        "ranks": plan.num_ranks,
        "device": plan.device_type,
        "ranks_share_gpus": plan.share_gpus,
        "full": plan.full,
        "only": plan.only,
        "seconds": round(finished.seconds, 1),
        **describe_run(),
        "cells": [asdict(result) for result in finished.results],
    }


def _table(plan: Plan, finished: Finished) -> Table:
    table = Table("checks", "passed", "skipped", "failed", "why")
    for group in dict.fromkeys(result.group for result in finished.results):
        results = [result for result in finished.results if result.group == group]
        counts = Counter(result.status for result in results)
        style = "red" if counts["failed"] else ""
        table.add_row(
            group, *(str(counts[status]) for status in ("passed", "skipped", "failed")), _why(results), style=style
        )
    return table


def _why(results: list[CellResult]) -> Text:
    """The first failure, or the traits that skipped something: a line each, with how many cells."""
    for result in results:
        if result.status == "failed":
            return Text(f"{result.cell}, rank {result.rank}: {result.message}")
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.status == "skipped":
            trait, _, reason = result.message.partition(": ")
            reasons.setdefault(trait, []).append(_NOT_SAID.sub("", reason))
    return Text("\n".join(f"{trait}: {_counted(reasons[trait])}" for trait in sorted(reasons)))


def _counted(reasons: list[str]) -> str:
    return f"{', '.join(sorted(set(reasons)))} ({counted(len(reasons), 'cell')})"
