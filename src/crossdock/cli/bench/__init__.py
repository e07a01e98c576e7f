"""`crossdock bench`: backends side by side on this machine, against what its links can do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .train_step import train_step

_FAILED, _INTERRUPTED = 1, 130


app = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown")
app.command("train-step")(train_step)


@app.callback()
def bench(
    context: typer.Context,
    backend: Annotated[list[str] | None, typer.Option(help="A backend; may be repeated. Default: all usable.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; under torchrun those there. Default: all GPUs, else 2.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workload: Annotated[
        list[str] | None, typer.Option(help="A named workload; may be repeated. Default: those of the device.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Own sizes: tokens of a rank.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Own sizes: elements of a row.")] = None,
    experts: Annotated[int | None, typer.Option(help="Own sizes: experts over all ranks.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Own sizes: slots of a token.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    routing: Annotated[
        list[str] | None, typer.Option(help="uniform, zipf or one-hot-rank; may be repeated. Default: uniform.")
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="exact, worst_case, balanced:FACTOR, rows or rows:N; may be repeated. Default: rows, as many as the"
            " routing needs, where the backend offers it, else exact."
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="The exact reduction too, beside fast.")] = False,
    num_sms: Annotated[int | None, typer.Option(help="The most blocks of a data-moving kernel.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats of a run. Default: 20, on a CPU 10.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of everything; how far they differ is noise.")] = 2,
    sweep: Annotated[
        str | None, typer.Option(help="Sweep over tokens of a rank: 'auto', or numbers as in 16,128,1024.")
    ] = None,
    bars: Annotated[bool, typer.Option("--bars", help="Hold the figures of symmetric against its bars.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and percent of the floor over tokens, a PNG.")] = None,
) -> None:
    """Measure backends side by side on this machine: dispatch, combine and their backward, eager and in CUDA graphs.

    Results are checked before anything is timed. Times stand beside the floor: what the bytes that must move take at
    the ceilings of this machine's links and memory, measured in the same run. Exits with 1 if a backend moved something
    wrong or failed, with 2 if a value cannot work.
    """
    if context.invoked_subcommand is not None:
        return
    from crossdock.errors import CrossdockError
    from crossdock.testing import RanksFailed

    from ..failures import exit_code_of, sentence_of
    from .plan import make_plan
    from .report import report
    from .run import Stopped, run
    from .sizes import Options

    options = Options(
        backends=tuple(backend or ()),
        ranks=ranks,
        device=device,
        workloads=tuple(workload or ()),
        sizes={"num_tokens": tokens, "hidden_dim": hidden, "num_experts": experts, "top_k": top_k},
        dtype=dtype,
        routings=tuple(routing or ("uniform",)),
        capacities=tuple(capacity or ()),
        exact=exact,
        num_sms=num_sms,
        repeats=repeats,
        runs=runs,
        sweep=sweep,
        bars=bars,
        json=json,
        plot=plot,
    )
    try:
        plan = make_plan(options)
        finished = run(plan)
    except KeyboardInterrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except Stopped as stopped:
        print(f"crossdock bench: {stopped}", file=sys.stderr)
        raise typer.Exit(_FAILED) from None
    except (CrossdockError, RanksFailed) as failure:
        print(f"crossdock bench: {sentence_of(failure)}", file=sys.stderr)
        raise typer.Exit(exit_code_of(failure)) from None
    if finished is None:  # under torchrun another rank reports
        return
    written = report(plan, finished)
    raise typer.Exit(0 if written and not finished.failed else _FAILED)
