"""What is moved: sizes that have a name, and how tokens choose their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

RoutingKind = Literal["uniform", "zipf", "one-hot-rank"]
ROUTINGS: tuple[str, ...] = get_args(RoutingKind)

ZIPF_EXPONENT = 1.2
_MAX_DECODE_TOKENS = 512
_HOT = 1e6  # above any logit


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of an exchange, the same number of tokens on every rank.

    Attributes:
        name: of the sizes.
        num_tokens: tokens of a rank.
        hidden_dim: elements of a row.
        num_experts: over all ranks.
        top_k: slots of a token; its experts are distinct.
        dtype: of the rows.
        routing: how tokens choose; see `draw_expert_ids`.
    """

    name: str
    num_tokens: int
    hidden_dim: int
    num_experts: int
    top_k: int = 8
    dtype: torch.dtype = torch.bfloat16
    routing: RoutingKind = "uniform"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_dim * self.dtype.itemsize

    @property
    def is_decode(self) -> bool:
        """Whether it is so small that a pair of dispatch and combine counts, not each by itself."""
        return self.num_tokens <= _MAX_DECODE_TOKENS

    @property
    def shape(self) -> str:
        """Its sizes but for the tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.hidden_dim} x {self.num_experts} experts, top-{self.top_k}, {dtype}, {self.routing}"

    def __str__(self) -> str:
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        return f"{self.name}: {tokens} a rank x {self.shape}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}


NAMED = {
    workload.name: workload
    for workload in (
        Workload(name="prefill", num_tokens=8192, hidden_dim=7168, num_experts=256),
        Workload(name="train", num_tokens=4096, hidden_dim=7168, num_experts=256),
        Workload(name="train-small", num_tokens=4096, hidden_dim=2048, num_experts=128),
        Workload(name="decode-128", num_tokens=128, hidden_dim=7168, num_experts=256),
        Workload(name="decode-16", num_tokens=16, hidden_dim=7168, num_experts=256),
        Workload(name="decode-1", num_tokens=1, hidden_dim=7168, num_experts=256),
        Workload(name="cpu", num_tokens=128, hidden_dim=512, num_experts=32),
        Workload(name="cpu-decode", num_tokens=16, hidden_dim=512, num_experts=32),
    )
}
DEFAULT_NAMES = {
    "cuda": ("prefill", "train", "train-small", "decode-128", "decode-16", "decode-1"),
    "cpu": ("cpu", "cpu-decode"),
}
SWEEPS = {"cuda": (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192), "cpu": (16, 64, 256, 1024)}


def draw_expert_ids(workload: Workload, ep_size: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for one rank's tokens: `[num_tokens, top_k]` int64 on the CPU.

    `uniform`: any are equally likely. `zipf`: the expert in place n of a fixed random order is chosen in proportion to
    n to the power of -1.2, without replacement. `one-hot-rank`: those of rank 0, and others only where it has fewer
    than `top_k`.
    """
    size = (workload.num_tokens, workload.num_experts)
    # The largest of logits with Gumbel noise are a draw without replacement, in proportion to exp(logit).
    noise = -torch.log(-torch.log(torch.rand(size, generator=generator).clamp_(1e-7, 1 - 1e-7)))
    return (noise + _logits(workload, ep_size)).topk(workload.top_k, dim=1).indices


def _logits(workload: Workload, ep_size: int) -> torch.Tensor:
    """`[num_experts]`."""
    logits = torch.zeros(workload.num_experts)
    if workload.routing == "zipf":
        order = torch.randperm(workload.num_experts, generator=torch.Generator().manual_seed(0))
        logits[order] = -ZIPF_EXPONENT * torch.arange(1, workload.num_experts + 1).log()
    elif workload.routing == "one-hot-rank":
        logits[: workload.num_experts // ep_size] = _HOT
    return logits
