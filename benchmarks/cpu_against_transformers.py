"""Our all-to-all beside the token exchange of Hugging Face transformers, on CPU ranks of this machine.

Forward and backward of dispatch, identity experts and combine, in one run, in turns. `make bench-cpu` runs it: results
go to `bench/`, which git ignores, and with `RECORD=1` into the record that docs/measurements.md is made from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from crossdock.bench import Comparison, Crossdock, Record, Workload, compare, describe_machine
from crossdock.bench.tables import COLUMNS, rows_of, title_of
from crossdock.bench.transformers_exchange import TransformersAllToAll

ROOT, NAME = Path(__file__).parents[1], "cpu_against_transformers.json"
SCRATCH, RECORD = ROOT / "bench" / NAME, ROOT / "benchmarks" / "results" / NAME
CONTESTANTS = (TransformersAllToAll(), Crossdock("all_to_all", "fast"), Crossdock("all_to_all", "exact"))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    machine = describe_machine(threads_per_rank=1)
    comparisons = []
    for dtype in options.dtypes:
        workload = Workload(
            num_tokens=options.tokens, hidden_dim=options.hidden, num_experts=32, top_k=8, dtype=DTYPES[dtype]
        )
        comparison = compare(workload, CONTESTANTS, num_ranks=options.ranks, rounds=options.rounds)
        comparisons.append(comparison)
        Console().print(shown(comparison))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    Record(machine=machine, comparisons=tuple(comparisons)).write(options.json)
    told = (
        "benchmarks/write_tables.py puts it into docs/measurements.md" if options.json == RECORD else "not the record"
    )
    print(f"written to {options.json}; {told}")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--json", type=Path, default=SCRATCH, help="where the results go (default: %(default)s)")
    place.add_argument("--record", action="store_const", dest="json", const=RECORD, help=f"they go to {RECORD}")
    return parser.parse_args(arguments)


def shown(comparison: Comparison) -> Table:
    table = Table(title=title_of(comparison))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows_of(comparison):
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
