"""What the pages say is so: code runs, links lead somewhere, tables and messages match the sources."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import crossdock as cd
from crossdock import reference
from crossdock.backends.base import BackendTraits, Transport
from tests.cli.commands import crossdock
from tests.conftest import Ranks
from tests.pages import blocks, names_after, router_and_experts

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "crossdock"
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def table_row(page: Path, first_cell: str) -> list[str]:
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| {first_cell} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- code --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run_one_after_the_other(page: Path):
    names_after(page)


@pytest.mark.parametrize("name", ["serving.md", "training.md"])
def test_pages_whose_programs_run_on_several_ranks_too(name: str, ranks: Ranks):
    (router, experts), (same_router, other_experts) = ranks(2).run(router_and_experts, DOCS / name)
    assert torch.equal(router, same_router)
    assert not any(torch.equal(*pair) for pair in zip(experts, other_experts, strict=True))


def test_experts_that_are_shown_are_others_on_every_rank():
    sources = [*PAGES, *(ROOT / "examples").glob("*.py"), *(PACKAGE / "nn").glob("*.py")]
    made = re.compile(r"= ?GroupedExperts\((.*?)\)[^\n()]*$", re.MULTILINE | re.DOTALL)
    shown = [call for path in sources for call in made.findall(path.read_text())]
    assert len(shown) >= 8
    assert [call for call in shown if not ("seed=" in call and "first_expert_id=" in call)] == []


def test_the_first_program_runs_on_two_ranks(tmp_path: Path):
    (program,) = blocks(README, "python")
    assert len(program.splitlines()) <= 35  # about twenty beside imports
    script = tmp_path / "moe.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stdout + found.stderr
    for rank in range(2):
        assert f"TokenDispatcher(backend='all_to_all', rank {rank} of 2): rows of its experts [" in found.stdout


def modules_with_examples() -> list[str]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text()]
    return [".".join(("crossdock", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_run(name: str):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_example_backend_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    example = blocks(DOCS / "adding-a-backend.md", "python")[0]
    (entry_point,) = blocks(DOCS / "adding-a-backend.md", "toml")
    group, line = entry_point.splitlines()
    assert group == '[project.entry-points."crossdock.backends"]'
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "one_rank.py").write_text(example)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[crossdock.backends]\n" + line.replace('"', "") + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    config = cd.DispatcherConfig(num_experts=2, top_k=1, hidden_dim=4, dtype=torch.float32, num_max_tokens_per_rank=2)
    with cd.TokenDispatcher(config, backend="one_rank") as dispatcher:
        assert dispatcher.backend_name == "one_rank"
    explanation = cd.explain(config)
    assert "one_rank" in str(explanation)
    assert explanation.chosen == "local"


# -- links and names ---------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_to_files_and_headings(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link} names no heading of {target.name}"


@each_page
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make((?: +[A-Z_]+=\S*)*) ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    assert {target for _, target in named} <= targets


def test_commands_exist():
    named = {name for page in PAGES for name in re.findall(r"\bcrossdock ([a-z]+)(?: --|`| \[)", page.read_text())}
    assert {"demo", "verify"} <= named
    shown = crossdock("--help").stdout
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", shown)] == []


def test_the_index_lists_every_page():
    index = (DOCS / "index.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"({page.name})" not in index] == []


# -- tables ------------------------------------------------------------------------------------------------------------


def candidates() -> dict[str, BackendTraits]:
    config = cd.DispatcherConfig(num_experts=1, top_k=1, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=1)
    return {candidate.name: candidate.traits for candidate in cd.explain(config).candidates}


def listed(values: frozenset[object]) -> str:
    return ", ".join(sorted(str(value).removeprefix("torch.") for value in values))


@pytest.mark.parametrize(("name", "traits"), candidates().items())
def test_the_backend_table_matches_the_traits(name: str, traits: BackendTraits):
    expected = [
        listed(traits.devices),
        listed(traits.dtypes),
        _capacities(traits),
        listed(traits.reductions),
        "yes" if traits.multi_node else "no",
        traits.needs,
    ]
    assert table_row(README, f"`{name}`")[2:] == expected


def _capacities(traits: BackendTraits) -> str:
    """The kinds offered anywhere, and on which devices it is `exact` alone."""
    fewer = [device for device in sorted(traits.devices) if not traits.offers("rows", device)]
    return listed(traits.row_capacities) + (f" ({', '.join(fewer)}: exact)" if fewer else "")


def test_the_backend_table_has_no_other_rows():
    section = README.read_text().split("## Backends")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(candidates())


def test_the_row_capacities_offered_are_those_of_the_traits():
    section = README.read_text().split("## Row capacities")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (yes|not yet) \|", section, re.MULTILINE)
    offered = {kind: answer == "yes" for kinds, answer in rows for kind in re.findall(r"`(\w+)\(", kinds)}
    of_traits = set().union(*(traits.row_capacities for traits in candidates().values()))
    constructors = {
        name for name, value in vars(cd.RowCapacity).items() if isinstance(value, classmethod) and name[0] != "_"
    }
    assert offered == {kind: kind in of_traits for kind in constructors}


def test_a_backend_s_author_finds_every_trait_and_movement():
    page = (DOCS / "adding-a-backend.md").read_text()
    traits = [field.name for field in dataclasses.fields(BackendTraits)]
    movements = [name for name, _ in inspect.getmembers(Transport, inspect.isfunction) if name[0] != "_"]
    assert [name for name in traits if f"`{name}`" not in page] == []
    assert [name for name in movements if f"`{name}(" not in page] == []


@pytest.mark.parametrize("error", cd.CrossdockError.__subclasses__(), ids=lambda error: error.__name__)
def test_every_error_is_explained(error: type[cd.CrossdockError]):
    names = [each.__name__ for each in error.__subclasses__()] if error.__name__[0] == "_" else [error.__name__]
    for name in names:
        assert f"| `{name}` (" in (DOCS / "contract.md").read_text()


# -- messages ----------------------------------------------------------------------------------------------------------

ERRORS = {"ConfigError", "InvalidInput", "ContractViolation", "PeerTimeout", "CapacityOverflow", "BackendUnavailable"}
# Programs on top, with messages of their own.
ON_TOP = {"cli", "bench", "testing"}


def rendered(node: ast.AST | None) -> str:
    """A string expression with `…` for everything that is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(rendered, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return rendered(left) + rendered(right)
    return "…"


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    """Every module with the part of the package that it belongs to."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).with_suffix("").parts[0], ast.parse(path.read_text())) for path in paths]


@functools.cache
def strings() -> list[str]:
    """Every string of the package."""
    return [text for _, tree in trees() for part in ast.walk(tree) if (text := rendered(part)) != "…"]


def documented() -> list[str]:
    page = DOCS / "troubleshooting.md"
    headings = re.findall(r"^### `(.*)`$", page.read_text(), re.MULTILINE)
    return [*headings, *(line for block in blocks(page, "messages") for line in block.splitlines())]


def raised() -> Iterator[str]:
    """Every message of an error of ours in the core: where it is raised, and why a backend cannot serve."""
    for part, tree in trees():
        if part in ON_TOP:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                texts = [rendered(argument) for argument in node.args[:2]]
                yield from [text for text in texts if re.search("[a-z]{2} ", text)]
            if isinstance(node, ast.FunctionDef) and node.name == "refusal":
                body = [part for statement in node.body for part in ast.walk(statement)]
                texts = [rendered(part) for part in body if isinstance(part, ast.JoinedStr)]
                yield from [text for text in texts if re.search("[a-z]{2} ", text)]


@pytest.mark.parametrize("message", documented())
def test_a_documented_message_exists(message: str):
    assert any(message in text for text in strings())


def test_every_message_is_documented():
    assert [text for text in raised() if not any(message in text for message in documented())] == []


# -- bounds ------------------------------------------------------------------------------------------------------------

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
HALF_SMALLEST = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_both_reductions_keep_their_error_bound(dtype: torch.dtype):
    num_ranks, top_k, num_experts, num_tokens = 4, 8, 8, 12
    generator = torch.Generator().manual_seed(7)
    x = [torch.zeros(num_tokens, 64, dtype=dtype) for _ in range(num_ranks)]
    scores = [torch.rand(num_tokens, top_k, generator=generator) - 0.5 for _ in range(num_ranks)]
    ids = [torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k] for _ in range(num_ranks)]
    there = reference.dispatch(x, scores, ids, num_experts)
    rows = [torch.randn(part.rows.shape, generator=generator).to(dtype) for part in there]
    truth = [torch.zeros(2, num_tokens, 64, dtype=torch.float64) for _ in range(num_ranks)]
    for rank, part in enumerate(there):
        for row, place in enumerate(part.origin):
            assert place is not None, "nothing is padded here"
            source, token, slot = place
            term = scores[source][token, slot].double() * rows[rank][row].double()
            truth[source][:, token] += torch.stack([term, term.abs()])

    y, size = (torch.cat([part[i] for part in truth]) for i in range(2))
    u, lost = ROUNDOFF[dtype], top_k * 2.0**-24
    g = lost / (1 - lost)
    floor = (num_ranks + 1) * HALF_SMALLEST[dtype]
    bounds = {
        "exact": u * y.abs() + (1 + u) * g * size + floor,
        "fast": u * y.abs() + (1 + u) * (u + (1 + u) * g) * size + floor,
    }
    errors = {}
    for reduction, bound in bounds.items():
        out = reference.combine(rows, there, scores, [num_tokens] * num_ranks, reduction)
        errors[reduction] = (torch.cat(out).double() - y).abs()
        assert bool((errors[reduction] <= bound).all())
    assert dtype == torch.float32 or bool((errors["fast"] > bounds["exact"]).any()), "the wider bound is needed"
