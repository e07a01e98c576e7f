"""The command line: one module or folder a command. Each imports what it works with only when it runs."""

from __future__ import annotations

import typer

from . import bench, demo, doctor, verify

app = typer.Typer(
    name="crossdock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One token dispatcher for expert-parallel mixture-of-experts on PyTorch.",
)
app.command("demo")(demo.demo)
app.command("verify")(verify.verify)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command that was typed."""
    app()
