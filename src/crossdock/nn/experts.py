"""SwiGLU experts over rows sorted by expert, the usual consumer of a dispatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ConfigError, InvalidInput
from ..types import check_positive_int
from .grouped import grouped_product, reads_counts_on_host, silu_by_expert

_EXPERT_BITS = 20  # the low bits of one expert's seed: its global id
_NUM_SEEDS = 1 << (63 - _EXPERT_BITS)


class GroupedExperts(nn.Module):
    """The local experts of one rank: `down(silu(gate(row)) * up(row))`, without biases.

        num_local = dispatcher.num_local_experts
        first = dispatcher.ep_rank * num_local  # with the seed: expert 5 is the same one wherever it lives
        experts = GroupedExperts(num_local, 2048, 768, dtype=torch.bfloat16, seed=0, first_expert_id=first)
        rows = experts(routed.rows, routed.expert_offsets)

    Nothing is read on the host on a Hopper or datacentre Blackwell GPU in bfloat16 with widths that are multiples of 8
    (`reads_counts_on_host` tells); rows behind the last offset are never read, and their outputs are uninitialised.
    An expert's output and gradients do not depend on which other experts the rank holds: on a CPU to the bit. Experts
    without rows get gradients of zeros.

    Attributes:
        gate_proj, up_proj: `[num_local_experts, hidden_dim, ffn_dim]`.
        down_proj: `[num_local_experts, ffn_dim, hidden_dim]`.
        seed, first_expert_id: that the weights were last drawn with.

    Args:
        num_local_experts: experts of this rank.
        hidden_dim: elements of a row.
        ffn_dim: elements of an expert's inner row.
        dtype: of the weights, and so of the rows.
        device: of the weights.
        seed: with `first_expert_id`, fixes the initial weights of every expert, whatever the EP size and device; None
            draws from torch's global generator, which gives all ranks the same experts where they have seeded it alike.
        first_expert_id: global id of this rank's first expert, `ep_rank * num_local_experts`; belongs to a seed. None
            is 0, and an `MoE` over several ranks refuses it.

    Raises:
        ConfigError: a size that is not a positive integer, a seed that is negative or 2**43 or more, a
            `first_expert_id` without a seed.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden_dim: int,
        ffn_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        seed: int | None = None,
        first_expert_id: int | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("num_local_experts", num_local_experts), ("hidden_dim", hidden_dim), ("ffn_dim", ffn_dim)):
            check_positive_int(name, size)
        self.num_local_experts, self.hidden_dim, self.ffn_dim = num_local_experts, hidden_dim, ffn_dim
        inward, outward = (num_local_experts, hidden_dim, ffn_dim), (num_local_experts, ffn_dim, hidden_dim)
        self.gate_proj = nn.Parameter(torch.empty(inward, dtype=dtype, device=device))
        self.up_proj = nn.Parameter(torch.empty(inward, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(outward, dtype=dtype, device=device))
        self.seed: int | None = None
        self.first_expert_id: int | None = None
        self.reset_parameters(seed, first_expert_id)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, first_expert_id: int | None = None) -> None:
        """Draw all weights uniformly from +-1 / sqrt(fan in), as `nn.Linear` does; arguments as for the class.

        Without arguments, as after `to_empty` of a module that was made on the meta device: as they were drawn last.

        Raises:
            ConfigError: a seed that is negative, or too large to be shifted; a `first_expert_id` without one.
        """
        if seed is None and first_expert_id is None:
            seed, first_expert_id = self.seed, self.first_expert_id
        if seed is None and first_expert_id is not None:
            raise ConfigError(
                f"first_expert_id ({first_expert_id}) chooses among the experts of a seed, and there is none: pass"
                " seed=, the same on every rank, or leave it out"
            )
        last = (1 << _EXPERT_BITS) - self.num_local_experts  # behind it begin the experts of the next seed
        for name, number, most in (("seed", seed, _NUM_SEEDS - 1), ("first_expert_id", first_expert_id, last)):
            if number is not None and (not isinstance(number, int) or not 0 <= number <= most):
                raise ConfigError(f"{name} must lie in 0..{most}, got {number!r}")
        self.seed, self.first_expert_id = seed, first_expert_id
        for expert in range(self.num_local_experts):
            # Drawn on the CPU in float32, so that an expert starts with the same numbers on every device.
            # The shift keeps the experts of layers with neighbouring seeds apart.
            expert_seed = None if seed is None else (seed << _EXPERT_BITS) + (first_expert_id or 0) + expert
            generator = None if expert_seed is None else torch.Generator().manual_seed(expert_seed)
            for weights in (self.gate_proj, self.up_proj, self.down_proj):
                if not weights.is_meta:
                    bound = weights.shape[1] ** -0.5
                    weights[expert] = torch.empty(weights.shape[1:]).uniform_(-bound, bound, generator=generator)

    @property
    def reads_counts_on_host(self) -> bool:
        """Whether `forward` and its backward read `expert_offsets` on the host: a synchronisation on a GPU."""
        return reads_counts_on_host(self.gate_proj.device, self.gate_proj.dtype, self.hidden_dim, self.ffn_dim)

    def forward(self, rows: Tensor, expert_offsets: Tensor, scores: Tensor | None = None) -> Tensor:
        """Run every expert on its group of rows.

        Args:
            rows: `[R, hidden_dim]`, sorted by expert (`Dispatched.rows`); R may be 0.
            expert_offsets: `[num_local_experts]` int32 inclusive ends of the groups (`Dispatched.expert_offsets`).
            scores: `[R]` float32 (`Dispatched.scores`): multiplied, in float32, onto the inner row between up and down
                projection, which needs no saved output row for the scores' gradient; combine then with
                `apply_scores=False`. None leaves the scores to combine.

        Returns:
            `[R, hidden_dim]`; rows behind the last offset are uninitialised.

        Raises:
            InvalidInput: rows or offsets that do not fit the weights.
        """
        self._check(rows, expert_offsets)
        with torch.autocast(rows.device.type, enabled=False):  # the weights' dtype is the caller's word
            gate = grouped_product(rows, self.gate_proj, expert_offsets)
            # One launch on a GPU, whose bits never depend on where in a tensor an element lies; a CPU's can.
            gate = nn.functional.silu(gate) if gate.is_cuda else silu_by_expert(gate, expert_offsets)
            inner = gate * grouped_product(rows, self.up_proj, expert_offsets)
            if scores is not None:
                inner = (inner.float() * scores.unsqueeze(-1)).to(inner.dtype)
            out: Tensor = grouped_product(inner, self.down_proj, expert_offsets)
        return out

    def _check(self, rows: Tensor, expert_offsets: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != self.hidden_dim or rows.dtype != self.gate_proj.dtype:
            raise InvalidInput(
                f"rows must be {self.gate_proj.dtype} [R, {self.hidden_dim}] like the experts' weights,"
                f" got {rows.dtype} {list(rows.shape)}"
            )
        if expert_offsets.dtype != torch.int32 or expert_offsets.shape != (self.num_local_experts,):
            raise InvalidInput(
                f"expert_offsets must be torch.int32 [{self.num_local_experts}],"
                f" got {expert_offsets.dtype} {list(expert_offsets.shape)}"
            )

    def extra_repr(self) -> str:
        """Sizes, as `print(module)` shows them."""
        return f"{self.num_local_experts} experts, hidden_dim={self.hidden_dim}, ffn_dim={self.ffn_dim}"
