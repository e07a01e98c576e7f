"""The command line: one module or folder a command. Each imports what it works with only when it runs."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from . import bench, demo, doctor, verify

app = typer.Typer(
    name="crossdock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fills the lines of a paragraph
    help="One token dispatcher for expert-parallel mixture-of-experts on PyTorch.",
)


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    from .environment import versions

    found = versions()
    triton = f"triton {found['triton']}" if found["triton"] else "triton is not installed"
    print(f"crossdock {found['crossdock']}\nPython {found['python']}, torch {found['torch']}, {triton}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("verify")(verify.verify)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command that was typed; where nobody takes what it prints, a sentence says so."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not closed; what its encoding lacks, as of a path, is written out
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as it is where it was closed
                sys.stdout.flush()
    except OSError as error:
        if not _is_stdout_broken():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what the interpreter still has of it
        if error.errno != errno.EPIPE:  # as of `| head`, which has seen enough
            print(f"crossdock: the output could not be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _is_stdout_broken() -> bool:
    """Whether it takes nothing, which only another attempt can tell."""
    if sys.stdout is None:
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False
