"""Records as tables: rows of text for a terminal or for a page."""

from __future__ import annotations

from .record import Comparison, Measurement

COLUMNS = (
    "",
    "ms, slowest rank (10 to 90 % of rounds)",
    "times as fast",
    "skew %",
    "MB sent a rank",
    "peak memory MB",
)


def rows_of(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row of `COLUMNS` for each contestant."""
    return [_row(measurement) for measurement in comparison.measurements]


def _row(measurement: Measurement) -> tuple[str, ...]:
    ratio, memory = measurement.times_as_fast, measurement.peak_memory_bytes
    return (
        measurement.name,
        f"{measurement.slowest_rank_ms:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{measurement.skew_pct:.1f}",
        f"{measurement.sent_bytes_per_rank / 1e6:.2f}",
        "" if memory is None else f"{memory / 1e6:.0f}",
    )


def title_of(comparison: Comparison) -> str:
    """What was measured, in one line."""
    w = comparison.workload
    shape = f"{w['num_tokens']} tokens a rank x {w['hidden_dim']}, {w['num_experts']} experts, top-{w['top_k']}"
    return f"{shape}, {w['dtype']}, {comparison.num_ranks} ranks, {comparison.rounds} rounds"


def as_markdown(comparison: Comparison) -> str:
    """Title and table for a page."""
    lines = [COLUMNS, ("---",) + ("---:",) * (len(COLUMNS) - 1), *rows_of(comparison)]
    return "\n".join([f"{title_of(comparison)}:", "", *(f"| {' | '.join(line)} |" for line in lines)])
