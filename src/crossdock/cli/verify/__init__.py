"""`crossdock verify`: run the conformance suite of a backend on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_WRONG_VALUE, _FAILED, _INTERRUPTED = 2, 1, 130


def verify(
    backend: Annotated[str, typer.Option(help="The backend to verify, by name.")] = "all_to_all",
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; under torchrun those that are there. Default: 2, local: 1.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    share_gpus: Annotated[
        bool,
        typer.Option("--share-gpus", help="With --device cuda: ranks share a GPU, by turns, if the backend lets them."),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(help="Sets of ranks that share the cells, where a machine has cores for them; not by torchrun."),
    ] = 1,
    full: Annotated[bool, typer.Option("--full", help="The whole workload grid, not pairs of its values.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            help="Only cells of whose description this is a whole part, as 'float16' is one of 'skewed, float16, ...';"
            " if it is a part of none, those that contain this text."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all cells and the machine to this file.")] = None,
) -> None:
    """Run the conformance suite of a backend on this machine and say what passed.

    Every workload is checked against the reference, forward and backward, to the bit wherever the contract says so.
    Exits with 1 if anything failed, with 2 if a value cannot work.
    """
    from crossdock.errors import BackendUnavailable, ConfigError

    from .plan import make_plan
    from .report import report
    from .run import run

    try:
        plan = make_plan(backend, ranks, device, share_gpus, jobs, full, only, json)
        finished = run(plan)
    except KeyboardInterrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (ConfigError, BackendUnavailable) as refused:
        print(f"crossdock verify: {refused}", file=sys.stderr)
        raise typer.Exit(_WRONG_VALUE) from None
    if finished is None:  # under torchrun another rank reports
        return
    written = report(plan, finished)
    raise typer.Exit(0 if finished.all_passed and written else _FAILED)
