"""Who may import whom, what may not be written, and what `import crossdock` may not do: read off the sources.

The layers, from the bottom: errors, names and types, which everyone may import; kernels; plain functions (permute,
row_memory, rows, reference, capacity, row_capacity, layer_sizes, routing, inputs); counters and the ledger; the group
and memory; backends; autograd, select, the accounts and statistics; an opened dispatcher, a layer's calls, the
dispatcher; the guard over it (overflow); and on top, with public names only, nn, testing, bench and the command line.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "crossdock"

EVERYONES = {"errors", "names", "types"}
# part -> the parts it may import beside its own and EVERYONES; a part with a dot is a single module.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "names": set(),
    "types": set(),
    "ordering": set(),
    "dynamo": set(),
    "callers": set(),
    "kernels": set(),
    "permute": set(),
    "row_memory": set(),
    "rows": {"kernels", "permute", "row_memory"},
    "inputs": set(),
    "reference": set(),
    "row_capacity": set(),
    "host_copy": set(),
    "layer_counters": set(),
    "ledger": {"host_copy", "kernels", "layer_counters"},
    "telemetry": set(),
    "capacity": set(),
    "routing": {"permute"},
    "group": set(),
    "memory": {"group"},
    "backends": {"permute", "row_memory", "rows", "inputs", "memory", "kernels", "group", "layer_counters"},
    "recompute": set(),
    "eager": set(),
    "operations": {"backends.base", "group", "recompute.frames", "row_capacity"},
    "autograd": {"eager", "operations", "ordering"},
    "select": {"backends", "group", "row_capacity"},
    "padding": {"backends.base"},
    "layer_sizes": {"row_capacity"},
    "statistics": {"accounts", "backends.base", "group", "host_copy", "ledger"},
    "accounts": {"backends.base", "callers", "group", "inputs", "kernels.account", "ledger", "row_capacity"},
    "opened": {
        "statistics",
        "accounts",
        "backends.base",
        "callers",
        "dynamo",
        "group",
        "inputs",
        "layer_sizes",
        "operations",
        "padding",
        "recompute.frames",
        "row_capacity",
        "rows",
    },
    "calls": {"autograd", "eager", "inputs", "opened", "recompute.frames"},
    "dispatcher": {"backends.base", "callers", "calls", "group", "opened", "select"},
    "overflow": {"dispatcher", "group", "host_copy", "ledger", "opened", "row_capacity"},
}
# These use what a user may use: the package's own names, and its public modules.
USERS = {"nn", "testing", "bench", "cli"}
# `backends.base` is what the author of a backend writes against.
MODULES = {
    "backends.base",
    "capacity",
    "overflow",
    "permute",
    "recompute",
    "reference",
    "routing",
    "row_capacity",
    "rows",
    "telemetry",
}
PUBLIC = {"", "errors", "types", *MODULES, *USERS} - {"cli"}
# What is public under another name: the loopback group as `crossdock.testing.LoopbackGroup`. The benchmark probes the
# link with a kernel of its own, which lives where kernels do; so do the delays that `testing.stress` asks for.
HOMES = {"testing": {"backends.loopback", "kernels.stress"}, "bench": {"kernels.link"}, "cli": {"kernels.digest"}}
# The other files are backends, and do not know each other.
SHARED_BY_BACKENDS = {"base", "wire", "wire_layout", "nccl"}

# library -> the only places that import it
LIBRARIES = {
    "triton": {"kernels"},
    "deep_ep": {"backends.deepep", "backends.hybridep", "backends.uccl"},
    "uccl": {"backends.uccl"},
    "transformers": {"bench"},
    "accelerate": {"bench"},
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"cli"},
    "prometheus_client": {"telemetry"},
    "tensorboard": set(),
    "safetensors": {"cli"},
    "pickle": {"testing"},
    "pytest": set(),
    "hypothesis": set(),
}


@dataclass(frozen=True)
class Source:
    """A module of ours: its name below `crossdock` ("" is the package itself) and its syntax tree."""

    name: str
    path: Path

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def tree(self) -> ast.Module:
        return parsed(self.path)

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def sources_of_package() -> list[Source]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append(Source(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def sources_of_users() -> list[Source]:
    """Examples and benchmarks: programs that use the package."""
    return [Source("", path) for folder in ("examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


SOURCES = sources_of_package()


def each(sources: list[Source]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", sources, ids=str)


of_package = each(SOURCES)


def imported(source: Source) -> Iterator[str]:
    """Yield the absolute name of every module or name that a file imports, at its top or anywhere below."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["crossdock", *source.name.split(".")] if source.name else ["crossdock"]
                is_package = source.path.name == "__init__.py"
                above = here[: len(here) - node.level + is_package]
                base = ".".join([*above, node.module] if node.module else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def internal(source: Source) -> set[str]:
    """Return the modules of ours that a file imports, without the leading `crossdock.`; "" is the package itself."""
    names = {source.name for source in SOURCES}
    found = set()
    for name in imported(source):
        first, *rest = name.split(".")
        if first == "crossdock":
            found.add(".".join(rest if ".".join(rest) in names else rest[:-1]))
    return found


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places if place)


@of_package
def test_every_module_has_its_place(source: Source):
    assert source.part in {"", *LAYERS, *USERS}, f"say in {Path(__file__).name} what {source} may import"


@each([source for source in SOURCES if source.part in LAYERS])
def test_layers_import_downwards(source: Source):
    allowed = {source.part, *EVERYONES, *LAYERS[source.part]}
    wrong = {module for module in internal(source) if not within(module, allowed)}
    assert not wrong, f"{source} imports {sorted(wrong)}; it may import {sorted(allowed)}"


@each([source for source in SOURCES if source.name.startswith("backends.")])
def test_a_backend_knows_no_other(source: Source):
    own = source.name.split(".")[1]
    others = {name.split(".")[1] for name in internal(source) if name.startswith("backends.")}
    assert others <= {own, *SHARED_BY_BACKENDS}


@each([source for source in SOURCES if source.part in USERS] + sources_of_users())
def test_users_take_public_names(source: Source):
    allowed = {*PUBLIC, *HOMES.get(source.part, set()), source.part}
    wrong = {module for module in internal(source) if module and not within(module, allowed)}
    assert not wrong, f"{source} imports {sorted(wrong)}, which are not public"
    private = {
        name
        for name in imported(source)
        if name.startswith("crossdock.")
        and any(word.startswith("_") and not word.endswith("__") for word in name.split("."))
        and not name.startswith(f"crossdock.{source.part}.")
    }
    assert not private, f"{source} imports private names: {sorted(private)}"


@of_package
def test_nothing_imports_the_command_line(source: Source):
    assert source.part == "cli" or not any(within(module, {"cli"}) for module in internal(source))


@of_package
def test_libraries_are_imported_where_they_belong(source: Source):
    for name in imported(source):
        library = name.split(".")[0]
        if library in LIBRARIES:
            assert within(source.name, LIBRARIES[library]), f"{source} imports {library}"


@each([source for source in SOURCES if source.part in EVERYONES])
def test_the_bottom_knows_only_torch(source: Source):
    allowed = {*sys.stdlib_module_names, "torch", "crossdock"}
    assert {name.split(".")[0] for name in imported(source)} <= allowed


@each([source for source in SOURCES if source.part == "kernels"])
def test_kernels_do_not_communicate(source: Source):
    written = {ast.unparse(node) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    assert not any(within(name, {"torch.distributed"}) for name in imported(source))
    assert "torch.distributed" not in written


def offences(source: Source) -> Iterator[str]:
    """Yield what the package does without: each with its line."""
    for node in ast.walk(source.tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Global():
                yield f"{line}: global"
            case ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name(id="Exception")):
                yield f"{line}: except Exception"
            case ast.ExceptHandler(type=ast.Name(id="BaseException")) if source.part != "testing":
                if not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node)):
                    yield f"{line}: except BaseException that does not raise it again"
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv"):
                # torch takes NCCL's error handling from its environment alone, when a group is built.
                if source.part not in {"cli", "testing"} and source.name != "backends.nccl":
                    yield f"{line}: os.{node.attr}"
            case ast.Name(id=name) if name.startswith("HAVE_"):
                yield f"{line}: {name}"
            case ast.Call(func=ast.Name(id="hasattr"), args=[target, _]) if "config" in ast.unparse(target):
                yield f"{line}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                if ast.unparse(kind).split(".")[-1] == "Backend" and source.name != "select":
                    yield f"{line}: {ast.unparse(node)}"
            case ast.ClassDef(bases=bases):
                functions = [base for base in map(ast.unparse, bases) if base.endswith("autograd.Function")]
                if functions and source.name != "autograd":
                    yield f"{line}: another autograd.Function"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield f"{line}: torch.load reads pickles"


@of_package
def test_what_the_package_does_without(source: Source):
    assert list(offences(source)) == []


IMPORT = """
import json, sys, threading, time
import torch, torch.distributed
before, threads = set(sys.modules), threading.active_count()
start = time.process_time()
import crossdock
print(json.dumps({
    "seconds": time.process_time() - start,
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "triton": "triton" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(),
    "new_threads": threading.active_count() - threads,
}))
"""


def import_facts() -> dict[str, object]:
    out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    facts: dict[str, object] = json.loads(out.stdout)
    return facts


@pytest.mark.alone
def test_importing_the_package_is_light():
    facts = import_facts()
    assert not facts["triton"]
    assert not facts["cuda"]
    assert not facts["group"]
    assert facts["new_threads"] == 0
    modules = facts["modules"]
    assert isinstance(modules, list)
    assert not set(modules) & (LIBRARIES.keys() - {"pickle"})


def test_importing_the_package_takes_under_300_ms():
    # Processor time of one of a few, since the machine has other work too.
    assert any(float(str(import_facts()["seconds"])) < 0.3 for _ in range(3))
