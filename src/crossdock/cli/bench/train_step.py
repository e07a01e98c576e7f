"""`crossdock bench train-step`: training steps, with dispatches that wait for counts and with such that do not."""

from __future__ import annotations

import json as json_module
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from crossdock.bench.train_step import StepCase, StepRun
    from crossdock.bench.train_step_model import RoutingKind, StepSizes

    from ..progress import Stages
    from .plan import Place
    from .run import Ranks

_WRONG_VALUE, _FAILED, _INTERRUPTED = 2, 1, 130
_STEPS = {"cuda": 20, "cpu": 8}
_FACTOR = 1.5
_COMMAND = "bench train-step"
_DTYPES = ("bfloat16", "float16", "float32")
_ROUTINGS: tuple[RoutingKind, ...] = ("dynamic", "static")


@dataclass(frozen=True)
class Measured:
    """One way of a routing: its runs, one after the other, each from the same beginning."""

    case: StepCase
    runs: tuple[StepRun, ...]

    def middle(self, name: str) -> float:
        """Of the runs' medians of a `Spread`."""
        return statistics.median(self._medians(name))

    def noise_pct(self, name: str) -> float | None:
        """How far the runs' medians lie apart; None of one run."""
        from crossdock.bench.timing import apart_pct

        return apart_pct(self._medians(name))

    def _medians(self, name: str) -> list[float]:
        return [getattr(run, name).median for run in self.runs]

    @property
    def idle_pct(self) -> float | None:
        """Of the device, the mean of the runs; None on a CPU."""
        found = [run.device_idle_pct for run in self.runs if run.device_idle_pct is not None]
        return statistics.mean(found) if found else None


@dataclass(frozen=True)
class Pair:
    """Both ways of one routing."""

    waiting: Measured
    free: Measured

    @property
    def same_bits(self) -> bool:
        """Whether all losses of all runs are the same."""
        return len({run.losses for run in (*self.waiting.runs, *self.free.runs)}) == 1


def train_step(
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; under torchrun those there. Default: all GPUs, else 2.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str | None, typer.Option(help="Default: auto's choice for a capacity of fixed size.")] = None,
    routing: Annotated[list[str] | None, typer.Option(help="dynamic or static. Default: both.")] = None,
    factor: Annotated[
        float | None, typer.Option(help=f"Of row_capacity calibrated, under dynamic routing. Default: {_FACTOR}.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks of the model.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a rank.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Elements of a token.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of a layer, over all ranks.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Elements of an expert's inner row.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a run that are timed. Default: 20, on a CPU 8.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of everything; how far they differ is noise.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine to this file.")] = None,
) -> None:
    """Measure a training step of a mixture-of-experts with dispatches that wait for counts, and with such that do not.

    Both train the same model from the same beginning on the same backend, all ranks with the same number of tokens,
    which is declared. Their losses must have the same bits: the command exits with 1 if not, with 2 if a value cannot
    work.
    """
    from crossdock.errors import CrossdockError
    from crossdock.testing import RanksFailed

    from ..paths import write_record
    from ..progress import stages
    from .plan import place_of
    from .run import ranks_at

    own = {"num_layers": layers, "num_tokens": tokens, "hidden_dim": hidden, "num_experts": experts, "top_k": top_k,
           "ffn_dim": ffn, "dtype": dtype}  # fmt: skip
    dynamic_factor = _FACTOR if factor is None else factor
    try:
        place = place_of(device, ranks)
        sizes, routings = _checked(own, routing, dynamic_factor, steps, runs, json, place)
        with ranks_at(place) as (call, reports), stages(_COMMAND, reports) as told:
            told.expect(2 * runs * len(routings))
            chosen, experts_wait = call(_backend, sizes, backend), call(_experts_wait, sizes, place.device_type)
            if reports and factor is not None and "static" in routings:
                _say(f"--factor {factor:g} does not apply to static routing, whose number of rows is known beforehand")
            start, pairs = time.monotonic(), []
            for each in routings:
                pairs.append(_measure(call, told, sizes, each, chosen, dynamic_factor, place, steps, runs))
            seconds = time.monotonic() - start
    except KeyboardInterrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (CrossdockError, RanksFailed) as failure:
        _say(str(failure))
        raise typer.Exit(_FAILED if isinstance(failure, RanksFailed) else _WRONG_VALUE) from None
    written = True
    for pair in pairs if reports else ():
        _print(_table(sizes, place, pair, experts_wait))
    if reports and json is not None:
        content = json_module.dumps(_as_dict(sizes, place, pairs, seconds), indent=1) + "\n"
        written = write_record(_COMMAND, "--json", json, content)
    raise typer.Exit(0 if written and all(pair.same_bits for pair in pairs) else _FAILED)


_OPTIONS = {"num_layers": "--layers", "num_tokens": "--tokens", "hidden_dim": "--hidden", "num_experts": "--experts",
            "top_k": "--top-k", "ffn_dim": "--ffn"}  # fmt: skip


def _say(sentence: str) -> None:
    from ..progress import say

    say(_COMMAND, sentence)


def _checked(
    own: dict[str, Any],
    routing: list[str] | None,
    factor: float,
    steps: int | None,
    runs: int,
    json: Path | None,
    place: Place,
) -> tuple[StepSizes, list[RoutingKind]]:
    """Sizes and routings.

    Raises:
        ConfigError: a value that cannot work, in one sentence.
    """
    from crossdock.bench.train_step_model import SIZES
    from crossdock.errors import ConfigError

    from ..paths import why_not_written

    sizes = replace(SIZES[place.device_type], **{name: value for name, value in own.items() if value is not None})
    numbers = {name: value for name, value in own.items() if name != "dtype"} | {"--steps": steps, "--runs": runs}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{_OPTIONS.get(name, name)} must be at least 1, got {number}")
    for wrong, sentence in (
        (factor <= 0, f"--factor must be above 0, got {factor:g}"),
        (sizes.dtype not in _DTYPES, f"--dtype must be one of {', '.join(_DTYPES)}, got {sizes.dtype!r}"),
        (sizes.top_k > sizes.num_experts, f"--top-k ({sizes.top_k}) must not exceed --experts ({sizes.num_experts})"),
        (
            sizes.num_experts % place.num_ranks != 0,
            f"{sizes.num_experts} experts do not divide over {place.num_ranks} ranks",
        ),
        (
            not {*(routing or ())} <= {*_ROUTINGS},
            f"--routing must be dynamic or static, got {', '.join(routing or ())}",
        ),
        (trouble := why_not_written("--json", json), trouble),
    ):
        if wrong:
            raise ConfigError(sentence)
    asked = set(routing or _ROUTINGS)
    return sizes, [each for each in _ROUTINGS if each in asked]


def _backend(rank: int, sizes: StepSizes, wanted: str | None) -> str:
    from crossdock.bench.train_step import sync_free_backend

    return sync_free_backend(rank, sizes, wanted)


def _experts_wait(rank: int, sizes: StepSizes, device_type: str) -> bool:
    """Whether the experts' products make the host wait for a GPU."""
    from crossdock.nn import GroupedExperts

    if device_type != "cuda":
        return False
    experts = GroupedExperts(1, sizes.hidden_dim, sizes.ffn_dim, dtype=sizes.torch_dtype, device=device_type)
    return experts.reads_counts_on_host


def _measure(
    call: Ranks,
    told: Stages,
    sizes: StepSizes,
    routing: RoutingKind,
    backend: str,
    factor: float,
    place: Place,
    steps: int | None,
    runs: int,
) -> Pair:
    """Both ways in turns, so that a machine that is disturbed for a while disturbs both."""
    from crossdock.bench.train_step import cases_of, run_case

    cases = cases_of(sizes, routing, backend, factor, place.num_ranks)
    num_steps = steps or _STEPS[place.device_type]
    found: list[list[StepRun]] = [[], []]
    for _ in range(runs):
        for case, of_case in zip(cases, found, strict=True):
            told.begin(f"{routing} routing, row_capacity {case.row_capacity}")
            of_case.append(call(run_case, case, num_steps))
            told.end()
    waiting, free = (Measured(case, tuple(of_case)) for case, of_case in zip(cases, found, strict=True))
    return Pair(waiting, free)


def _table(sizes: StepSizes, place: Place, pair: Pair, experts_wait: bool) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    case, reads = pair.free.case, pair.free.runs[0].host_reads_per_step
    title = f"{case.routing} routing, {case.backend}, {place.num_ranks} {place.device_type} ranks: {sizes}"
    table = Table(title=title, title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    free = "fixed rows" if reads or experts_wait else "sync-free"
    for column in ("", "waiting", free, "gain"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for line in _lines(pair):
        table.add_row(*line)
    remarks = ["losses of all steps: " + ("the same bits" if pair.same_bits else "THEY DIFFER")]
    if reads:
        remarks.append(f"{case.backend} takes its sizes from the host here: with fixed rows it reads counts too")
    if experts_wait:
        remarks.append(f"experts of {sizes.dtype} in these widths read counts on the host here: both columns wait")
    table.caption = "\n".join(remarks)
    return table


def _lines(pair: Pair) -> Iterator[tuple[str, ...]]:
    both = (pair.waiting, pair.free)
    yield "row_capacity", *(str(way.case.row_capacity) for way in both), ""
    for name, told in (("step_ms", "step, ms (runs apart)"), ("dispatch_host_us", "host, us a dispatch (runs apart)")):
        values = [way.middle(name) for way in both]
        texts = (f"{way.middle(name):,.4g} ({_pct(way.noise_pct(name))})" for way in both)
        yield told, *texts, f"{values[0] / values[1]:.2f} x"
    speeds = [statistics.median(run.tokens_per_s for run in way.runs) for way in both]
    yield "tokens a second", *(f"{speed:,.0f}" for speed in speeds), f"{100 * (speeds[1] / speeds[0] - 1):+.1f} %"
    yield "host reads of counts a step", *(f"{way.runs[0].host_reads_per_step:g}" for way in both), ""
    yield "device idle", *(_pct(way.idle_pct) for way in both), ""
    yield "rows of a layer, MB", *(f"{way.runs[0].bytes_per_layer / 1e6:,.4g}" for way in both), ""


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _print(table: Table) -> None:
    from rich.console import Console

    Console(width=110).print(table)


def _as_dict(sizes: StepSizes, place: Place, pairs: list[Pair], seconds: float) -> dict[str, Any]:
    from ..environment import describe_run

    return {
        **describe_run(),
        "ranks": place.num_ranks,
        "device": place.device_type,
        "sizes": asdict(sizes),
        "seconds": round(seconds, 1),
        "pairs": [
            {
                "routing": pair.free.case.routing,
                "backend": pair.free.case.backend,
                "same_bits": pair.same_bits,
                **{name: _way(way) for name, way in (("waiting", pair.waiting), ("sync_free", pair.free))},
            }
            for pair in pairs
        ],
    }


def _way(way: Measured) -> dict[str, Any]:
    return {
        "row_capacity": str(way.case.row_capacity),
        "step_ms": way.middle("step_ms"),
        "step_noise_pct": way.noise_pct("step_ms"),
        "dispatch_host_us": way.middle("dispatch_host_us"),
        "dispatch_host_noise_pct": way.noise_pct("dispatch_host_us"),
        "device_idle_pct": way.idle_pct,
        "runs": [asdict(run) for run in way.runs],
    }
