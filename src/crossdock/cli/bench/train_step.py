"""`crossdock bench train-step`: training steps, with dispatches that wait for counts and with such that do not."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .train_step_report import COMMAND, Measured, Pair, Steps, report

if TYPE_CHECKING:
    from crossdock.bench.train_step import StepRun
    from crossdock.bench.train_step_model import RoutingKind, StepSizes

    from ..progress import Stages
    from .plan import Place
    from .run import Ranks

_FAILED, _INTERRUPTED = 1, 130
_STEPS = {"cuda": 20, "cpu": 8}
_FACTOR = 1.5
_DTYPES = ("bfloat16", "float16", "float32")
_ROUTINGS: tuple[RoutingKind, ...] = ("dynamic", "static")


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
    layers: Annotated[int | None, typer.Option(help="Blocks of the model. Default: 4.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a rank. Default: 2048, on a CPU 128.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Elements of a token. Default: 2048, on a CPU 64.")] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts of a layer, over all ranks. Default: 64, on a CPU 8.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token. Default: 8, on a CPU 2.")] = None,
    ffn: Annotated[
        int | None, typer.Option(help="Elements of an expert's inner row. Default: 1408, on a CPU 64.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32. Default: bfloat16, on a CPU float32.")
    ] = None,
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

    from ..failures import exit_code_of, sentence_of

    own = {"num_layers": layers, "num_tokens": tokens, "hidden_dim": hidden, "num_experts": experts, "top_k": top_k,
           "ffn_dim": ffn, "dtype": dtype}  # fmt: skip
    try:
        found = _run(own, ranks, device, backend, routing, factor, steps, runs, json)
    except KeyboardInterrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (CrossdockError, RanksFailed) as failure:
        _say(sentence_of(failure))
        raise typer.Exit(exit_code_of(failure)) from None
    written = report(found, json) if found.reports else True
    raise typer.Exit(0 if written and all(pair.same_bits for pair in found.pairs) else _FAILED)


def _run(
    own: dict[str, Any],
    ranks: int | None,
    device: str,
    backend: str | None,
    routing: list[str] | None,
    factor: float | None,
    steps: int | None,
    runs: int,
    json: Path | None,
) -> Steps:
    """Check all options, and measure."""
    from crossdock.testing import traits_of

    from ..progress import stages
    from .plan import place_of
    from .run import ranks_at

    place, dynamic_factor = place_of(device, ranks), _FACTOR if factor is None else factor
    if backend is not None:
        traits_of(backend)
    sizes, routings = _checked(own, routing, dynamic_factor, steps, runs, json, place)
    with ranks_at(place) as (call, reports), stages(COMMAND, reports) as told:
        told.expect(2 * runs * len(routings))
        chosen, experts_wait = call(_backend, sizes, backend), call(_experts_wait, sizes, place.device_type)
        if reports and factor is not None and "static" in routings:
            _say(f"--factor {factor:g} does not apply to static routing, whose number of rows is known beforehand")
        start = time.monotonic()
        pairs = [_measure(call, told, sizes, each, chosen, dynamic_factor, place, steps, runs) for each in routings]
        return Steps(sizes, place, tuple(pairs), experts_wait, time.monotonic() - start, reports)


_OPTIONS = {"num_layers": "--layers", "num_tokens": "--tokens", "hidden_dim": "--hidden", "num_experts": "--experts",
            "top_k": "--top-k", "ffn_dim": "--ffn"}  # fmt: skip


def _say(sentence: str) -> None:
    from ..progress import say

    say(COMMAND, sentence)


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

    from ..output import counted
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
            f"{sizes.num_experts} experts do not divide over {counted(place.num_ranks, 'rank')}",
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
