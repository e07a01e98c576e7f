"""Programs of the documentation's pages, for the tests and for ranks that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from crossdock.nn import MoE


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def names_after(page: Path) -> dict[str, Any]:
    """Run a page's programs one after the other."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    return names


def router_and_experts(rank: int, page: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """On one of several ranks: what the page's layer routes with in the end, and what its experts are."""
    names = names_after(page)
    router = names["moe"].router.weight if isinstance(names["moe"], MoE) else names["router"]
    return router.detach(), names["experts"].gate_proj.detach()
