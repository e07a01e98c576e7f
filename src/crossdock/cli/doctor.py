"""`crossdock doctor`: what is usable here, and why the rest is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .extras import installed_by
from .finding import Finding

if TYPE_CHECKING:
    from crossdock import Explanation

# module -> what it is for; imported in a process of their own, since a broken one may raise anything, or crash.
_OPTIONAL = {
    "triton": "kernels on GPUs; on a CPU they are interpreted, for tests",
    "deep_ep": "no adapter yet",
    "hybrid_ep_cpp": "no adapter yet",
    "uccl": "no adapter yet",
    "transformers": "benchmarks against Hugging Face",
    "matplotlib": "pictures of the demo",
    "safetensors": "checkpoint of the demo",
}
_LOAD_TIMEOUT_S = 60.0


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(help="Start so many ranks and say whether they reach one another; under torchrun its own do."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what is usable on this machine, and why the rest is not. Exits with 2 if a value cannot work."""
    from crossdock.errors import ConfigError

    from .output import print_prose, stdout_console
    from .reach import look_at_ranks

    try:
        reached = look_at_ranks(ranks)
    except ConfigError as refused:
        print(f"crossdock doctor: {refused}", file=sys.stderr)
        raise typer.Exit(2) from None
    if reached is not None and not reached.reports:  # under torchrun another rank does
        return
    findings = [*examine(), *(reached.findings if reached else ())]
    if json:
        print(_as_json(findings, reached.choice if reached else _explain_sample().as_dict()))
        return
    console = stdout_console()
    console.print(_table(findings))
    if reached:  # they have opened every backend
        return
    sample = _explain_sample()
    print_prose(console, f"\nbackends for {sample.words}")
    print_prose(console, str(sample.explanation))
    print_prose(
        console,
        "For several ranks: crossdock doctor --ranks N, or print(crossdock.explain(config, group)) in your program.",
    )


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after the other."""
    yield from _versions()
    yield from _gpus()
    yield from _communication()
    yield from (_load(module, purpose) for module, purpose in _OPTIONAL.items())


def _versions() -> Iterator[Finding]:
    from .environment import versions

    for name, version in versions().items():
        if name != "triton":  # looked at below, where it is loaded
            yield Finding("versions", name, "absent" if version is None else "ok", version or "not installed")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        yield Finding("gpus", "CUDA", "absent", f"{built}; no device is visible")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        detail = f"compute capability {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        yield Finding("gpus", f"cuda:{index} {facts.name}", "ok", detail)
        peers = [
            str(peer)
            for peer in range(torch.cuda.device_count())
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ]
        yield Finding(
            "gpus",
            f"cuda:{index} peer access",
            "ok" if peers else "absent",
            f"to {', '.join(peers)}" if peers else "to none",
        )


def _communication() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("communication", "torch.distributed", "absent", "torch is built without it")
        return
    gloo = dist.is_gloo_available()
    yield Finding(
        "communication", "Gloo", "ok" if gloo else "absent", "built in" if gloo else "torch is built without it"
    )
    if not dist.is_nccl_available():
        yield Finding("communication", "NCCL", "absent", "torch is built without it")
        return
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, OSError) as error:
        yield Finding("communication", "NCCL", "broken", _first_line(str(error)))
        return
    yield Finding("communication", "NCCL", "ok", version)


def _load(module: str, purpose: str) -> Finding:
    """Import a module in a fresh process; find out first whether it is there at all."""
    script = (
        "import importlib, importlib.util, sys\n"
        f"if importlib.util.find_spec({module!r}) is None: sys.exit(3)\n"
        f"print(getattr(importlib.import_module({module!r}), '__version__', 'version unknown'))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("packages", module, "broken", f"importing it takes over {_LOAD_TIMEOUT_S:.0f} s ({purpose})")
    if done.returncode == 3:
        line = installed_by(module)
        return Finding("packages", module, "absent", f"not installed ({purpose})" + (f": {line}" if line else ""))
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("packages", module, "broken", f"{last_line} ({purpose})")
    return Finding("packages", module, "ok", f"{done.stdout.strip().splitlines()[-1]} ({purpose})")


class _Sample(NamedTuple):
    """What serves a configuration of usual sizes on one rank."""

    words: str
    explanation: Explanation

    def as_dict(self) -> dict[str, Any]:
        why_not = {candidate.name: candidate.why_not for candidate in self.explanation.candidates}
        return {"sample": self.words, "chosen": self.explanation.chosen, "candidates": why_not}


def _explain_sample() -> _Sample:
    import torch

    import crossdock

    config = crossdock.DispatcherConfig(
        num_experts=64, top_k=8, hidden_dim=2048, dtype=torch.bfloat16, num_max_tokens_per_rank=4096
    )
    return _Sample("one rank, 64 experts, top 8, hidden_dim 2048, bfloat16", crossdock.explain(config))


def _as_json(findings: list[Finding], backends: dict[str, Any]) -> str:
    import json

    from .environment import describe_run

    return json.dumps({**describe_run(), "findings": [asdict(f) for f in findings], "backends": backends}, indent=1)


def _table(findings: list[Finding]) -> Any:
    from rich.table import Table

    colours = {"ok": "green", "absent": "yellow", "broken": "red"}
    table = Table("area", "what", "status", "detail")
    for finding in findings:
        table.add_row(finding.area, finding.name, f"[{colours[finding.status]}]{finding.status}", finding.detail)
    return table


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
