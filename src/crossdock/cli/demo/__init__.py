"""`crossdock demo`: train a small mixture-of-experts transformer on real text, and prove what came out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..extras import DEMO, why_not_installed

if TYPE_CHECKING:
    from .settings import Job

_FAILED, _INTERRUPTED = 1, 130
_MOST_SEED = 2**32 - 1  # times some thousand it still is a seed of torch's
_ONE_PROCESS = {"local", "loopback"}  # every proof has ranks in several


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 300,
    ranks: Annotated[int | None, typer.Option(help="Ranks that train: all GPUs, or 2 on the CPU.")] = None,
    backend: Annotated[str, typer.Option(help="The dispatcher's transport.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="A text file or folder instead of Python's own library.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("demo"),
    json: Annotated[Path | None, typer.Option(help="Write the report to this file too.")] = None,
) -> None:
    """Train a small mixture-of-experts on this machine's ranks, and prove what came out.

    The experts are spread over the ranks, the rest is data-parallel. Afterwards the same steps are run in other ways
    (one rank, padded tokens, sharded sequences), which must give the same bits. Writes two pictures, a report and a
    checkpoint, and exits with 1 if anything did not hold.
    """
    from crossdock.errors import CrossdockError
    from crossdock.testing import RanksFailed

    from ..failures import exit_code_of, sentence_of

    try:
        job, num_ranks = _checked(steps, ranks, backend, data, seed, out, json)
        from .conduct import conduct  # which imports all that the demo needs

        holds = conduct(job, num_ranks, json)
    except KeyboardInterrupt:
        _say("\ninterrupted; all ranks have ended" + ("\x1b[?25h" if sys.stderr.isatty() else ""))  # show the cursor
        raise typer.Exit(_INTERRUPTED) from None
    except (RanksFailed, CrossdockError) as failure:
        _say(f"crossdock demo: {sentence_of(failure)}")
        raise typer.Exit(exit_code_of(failure)) from None
    raise typer.Exit(0 if holds else _FAILED)


def _checked(
    steps: int, ranks: int | None, backend: str, data: Path | None, seed: int, out: Path, json: Path | None
) -> tuple[Job, int]:
    """The job and the number of ranks.

    Raises:
        ConfigError, InvalidInput: a value that cannot work, in one sentence.
    """
    from crossdock import explain
    from crossdock.errors import ConfigError

    from ..paths import why_not_written
    from .data import load_text
    from .launch import choose_num_ranks
    from .settings import Job

    if trouble := why_not_installed(*DEMO):
        raise ConfigError(trouble)
    job = Job(steps=steps, seed=seed, backend=backend, data=data, out=out)
    candidates = explain(job.sizes.dispatcher_config(1, "exact"), device="cpu").candidates
    known = ["auto", *(each.name for each in candidates if each.name not in _ONE_PROCESS)]
    for wrong, sentence in (
        (steps < 1, f"--steps must be at least 1, got {steps}"),
        (not 0 <= seed <= _MOST_SEED, f"--seed must lie in 0..{_MOST_SEED}, got {seed}"),
        (backend not in known, f"--backend must be one of {', '.join(known)}, got {backend}"),
        (data is not None and not data.exists(), f"--data {data} does not exist"),
        (out.exists() and not out.is_dir(), f"--out {out} is a file, it must be a folder"),
        (trouble := why_not_written("--json", json), trouble),
    ):
        if wrong:
            raise ConfigError(sentence)
    num_ranks = choose_num_ranks(ranks, job.sizes.num_experts)
    load_text(data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}") from error
    return job, num_ranks


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
