"""What one run of the demo is asked to do, and the sizes of its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import crossdock as cd
from crossdock.capacity import for_pretraining
from crossdock.types import Reduction

TIMEOUT_S = 60.0  # for one call of a dispatcher: a rank that stops answering ends the demo after that


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the transformer. The defaults have 3.3 million parameters, 94 % of them in experts.

    Attributes:
        num_layers: blocks, each of attention and an MoE layer.
        num_heads: attention heads, a divisor of `hidden_dim`.
        hidden_dim: elements of a token.
        num_experts: experts of one layer, over all ranks.
        top_k: experts of one token.
        ffn_dim: elements of an expert's inner row.
        seq_len: bytes of a training sequence.
        experts_dtype: of the experts' weights, and of the rows they receive.
    """

    num_layers: int = 2
    num_heads: int = 4
    hidden_dim: int = 128
    num_experts: int = 16
    top_k: int = 2
    ffn_dim: int = 256
    seq_len: int = 128
    experts_dtype: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """`experts_dtype`."""
        dtype: torch.dtype = getattr(torch, self.experts_dtype)
        return dtype

    def dispatcher_config(self, num_sequences: int, reduction: Reduction, **more: Any) -> cd.DispatcherConfig:
        """The dispatcher that all layers share, for `num_sequences` sequences a rank; `more` of its fields."""
        return cd.DispatcherConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            dtype=self.dtype,
            num_max_tokens_per_rank=for_pretraining(num_sequences, self.seq_len),
            reduction=reduction,
            timeout_s=TIMEOUT_S,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the demo, the same on every rank.

    Attributes:
        steps: training steps.
        seed: of weights and batches.
        backend: the dispatcher's transport wherever there is more than one rank.
        data: a file or folder of text; None takes the standard library of this Python.
        out: the folder that is written.
        num_sequences: sequences of one training batch on one rank.
        sizes: the model.
    """

    steps: int
    seed: int
    backend: str
    data: Path | None
    out: Path
    num_sequences: int = 8
    sizes: ModelSizes = field(default_factory=ModelSizes)
