"""Put the tables of benchmarks/results/*.json into docs/measurements.md, between the markers that name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from crossdock.bench import Record
from crossdock.bench.tables import as_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measurements.md"
MARKED = re.compile(r"(<!-- (table|bench|step) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BENCH_COLUMNS = ("SMs", "operation", "eager us", "% of f", "in a graph us", "% of f", "host us", "in grad mode")


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    write = {"table": tables_of, "bench": bench_of, "step": steps_of}
    return MARKED.sub(lambda found: found[1] + write[found[2]](found[3]) + found[4], page)


def tables_of(name: str) -> str:
    record = Record.read(RESULTS / f"{name}.json")
    facts = ", ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in record.machine.items())
    return "\n".join([f"Machine: {facts}.", "", *(as_markdown(part) + "\n" for part in record.comparisons), ""])


def bench_of(name: str) -> str:
    """A record of `crossdock bench`: a table for each workload and backend."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    ceilings = {kind: record["ceilings"][f"{kind}_gb_per_s"] for kind in ("put", "get", "copy", "collective")}
    links = ", ".join(f"{kind} {ceiling:.0f}" for kind, ceiling in ceilings.items() if ceiling is not None)
    head = f"{_origin(record)} Ceilings, GB/s: {links}."
    figures: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for figure in record["figures"]:
        sizes = figure["workload"]
        shape = f"{sizes['num_tokens']} x {sizes['hidden_dim']}, {sizes['num_experts']} experts, {sizes['routing']}"
        title = f"`{sizes['name']}` ({shape}), {figure['backend']}, {figure['capacity']}"
        row = (str(figure["num_sms"] or "auto"), figure["operation"])
        figures.setdefault(title, {}).setdefault(row, {})[figure["mode"]] = figure
    return "\n".join([head, "", *(_bench_table(title, rows) for title, rows in figures.items()), ""])


def steps_of(name: str) -> str:
    """A record of `crossdock bench train-step`: a table for each routing."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    return "\n".join([_origin(record), "", *(_step_table(pair) for pair in record["pairs"]), ""])


def _step_table(pair: dict[str, Any]) -> str:
    kinds = [pair["waiting"], pair["sync_free"]]
    lines = [
        ("", *(kind["row_capacity"] for kind in kinds)),
        ("---", "---:", "---:"),
        ("step, ms (runs apart)", *(f"{kind['step_ms']:.1f} ({_number(kind['step_noise_pct'])} %)" for kind in kinds)),
        (
            "host, us a dispatch (runs apart)",
            *(f"{kind['dispatch_host_us']:.0f} ({_number(kind['dispatch_host_noise_pct'])} %)" for kind in kinds),
        ),
        ("host reads of counts a step", *(f"{kind['runs'][0]['host_reads_per_step']:g}" for kind in kinds)),
        ("device idle, %", *(_number(kind["device_idle_pct"], 1) for kind in kinds)),
        ("rows of a layer, MB", *(f"{kind['runs'][0]['bytes_per_layer'] / 1e6:.1f}" for kind in kinds)),
    ]
    bits = "the same bits" if pair["same_bits"] else "DIFFERENT BITS"
    title = f"{pair['routing'].capitalize()} routing, {pair['backend']}; losses of all steps: {bits}."
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _origin(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{part} {version}" for part, version in record["versions"].items())
    where = ", ".join(record["machine"]["gpus"] or [record["machine"]["processor"]])
    return f"`{record['command']}` on {where}; {versions}."


def _bench_table(title: str, rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = [BENCH_COLUMNS, ("---", "---") + ("---:",) * (len(BENCH_COLUMNS) - 2)]
    for row, modes in rows.items():
        times = [text for mode in ("eager", "graph") for text in _time(modes.get(mode))]
        host = [_number(next(iter(modes.values()))[key]) for key in ("host_us", "host_grad_us")]
        lines.append((*row, *times, *host))
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _time(figure: dict[str, Any] | None) -> tuple[str, str]:
    if figure is None:
        return "", ""
    return f"{figure['us']['median']:.1f}", _number(figure["pct_of_floor"])


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
