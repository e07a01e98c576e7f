"""Put the tables of benchmarks/results/*.json into docs/measurements.md, between the markers that name them."""

from __future__ import annotations

import re
from pathlib import Path

from crossdock.bench import Record
from crossdock.bench.tables import as_markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measurements.md"
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    return MARKED.sub(lambda found: found[1] + tables_of(found[2]) + found[3], page)


def tables_of(name: str) -> str:
    record = Record.read(ROOT / "benchmarks" / "results" / f"{name}.json")
    facts = ", ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in record.machine.items())
    return "\n".join([f"Machine: {facts}.", "", *(as_markdown(part) + "\n" for part in record.comparisons), ""])


if __name__ == "__main__":
    main()
