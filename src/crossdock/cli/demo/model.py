"""A byte-level mixture-of-experts transformer, small enough for a laptop: `crossdock.nn.MoE` in every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossdock import TokenDispatcher
from crossdock.nn import GroupedExperts, MoE, MoEResult
from crossdock.routing import Routing, count_tokens_per_expert, sigmoid_topk, update_bias

from .parallel import SequenceSharding
from .settings import ModelSizes

NUM_BYTES = 256
_BALANCE_SPEED = 0.01  # of the routers' selection bias, a step


@dataclass(frozen=True, eq=False)
class Output:
    """What a forward pass gives.

    Attributes:
        logits: `[B, s, 256]`: of the byte that follows each of this rank's tokens.
        tokens_per_expert: `[num_layers, num_experts]` int64: how many of this rank's slots named each expert.
    """

    logits: Tensor
    tokens_per_expert: Tensor


class Attention(nn.Module):
    """Causal self-attention; under a sharded sequence each rank gathers the tokens and computes its share of heads."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.num_heads, self.head_dim = sizes.num_heads, sizes.hidden_dim // sizes.num_heads
        self.norm = nn.LayerNorm(sizes.hidden_dim)
        spread = sizes.hidden_dim**-0.5
        self.inward = nn.Parameter(torch.randn(sizes.hidden_dim, sizes.num_heads, 3 * self.head_dim) * spread)
        self.outward = nn.Parameter(torch.randn(sizes.num_heads, self.head_dim, sizes.hidden_dim) * spread / 2)
        # How steeply a head prefers near tokens, which stands in for positions (ALiBi, arXiv 2108.12409).
        self.register_buffer("slopes", 2.0 ** torch.arange(0, -2 * sizes.num_heads, -2), persistent=False)

    def forward(self, x: Tensor, sharding: SequenceSharding) -> Tensor:
        """`[B, s, hidden_dim]` to the same shape."""
        num_mine = self.num_heads // sharding.size
        mine = slice(sharding.rank * num_mine, (sharding.rank + 1) * num_mine)
        inward = sharding.whole(self.norm(x)) @ self.inward[:, mine].flatten(1)  # [B, S, num_mine * 3 * head_dim]
        query, key, value = inward.unflatten(2, (num_mine, -1)).transpose(1, 2).chunk(3, dim=-1)
        # Written out: torch's fused attention adds gradients on a GPU in an order that changes from run to run.
        weights = (query @ key.mT) * self.head_dim**-0.5 + self._preference(sharding.length)[mine]
        heads = (weights.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return sharding.shard_of_sum(heads @ self.outward[mine].flatten(0, 1))

    def _preference(self, length: int) -> Tensor:
        """`[num_heads, length, length]`: minus slope times distance, -inf for tokens that are yet to come."""
        slopes = self.get_buffer("slopes")
        place = torch.arange(length, device=slopes.device)
        distance = place.unsqueeze(1) - place
        return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)


class Block(nn.Module):
    """Attention, then a mixture of experts, each added to the tokens. The router's bias keeps the experts balanced."""

    def __init__(self, sizes: ModelSizes, dispatcher: TokenDispatcher, name: str, seed: int) -> None:
        super().__init__()
        self.name, self.top_k, self.dtype = name, sizes.top_k, sizes.dtype
        self.attention = Attention(sizes)
        self.norm = nn.LayerNorm(sizes.hidden_dim)
        self.register_buffer("expert_bias", torch.zeros(sizes.num_experts))
        experts = GroupedExperts(
            dispatcher.num_local_experts,
            sizes.hidden_dim,
            sizes.ffn_dim,
            seed=seed,
            first_expert_id=dispatcher.ep_rank * dispatcher.num_local_experts,
            dtype=sizes.dtype,
        )
        router = nn.Linear(sizes.hidden_dim, sizes.num_experts, bias=False)
        self.moe = MoE(dispatcher.layer(name), router, experts, routing=self.route)

    def route(self, logits: Tensor) -> Routing:
        """Sigmoid top-k, its choice balanced by a bias, as in DeepSeek-V3."""
        return sigmoid_topk(logits, self.top_k, bias=self.get_buffer("expert_bias"))

    def forward(self, x: Tensor, sharding: SequenceSharding, num_tokens_per_rank: int | None) -> tuple[Tensor, Tensor]:
        """Tokens `[B, s, hidden_dim]`, and the tokens this rank sent to each expert."""
        x = x + self.attention(x, sharding)
        tokens = self.norm(x).to(self.dtype)
        result = self.moe(tokens, num_tokens_per_rank=num_tokens_per_rank, return_routing=True)
        assert isinstance(result, MoEResult)
        counts = count_tokens_per_expert(result.routing.topk_expert_ids, self.moe.router.out_features)
        return x + result.out, counts


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out.

    Every rank has the same dense weights for the same seed, and of the experts those that its dispatcher gives it: an
    expert starts with the same numbers whatever the number of ranks.

    Args:
        sizes: of the model.
        dispatcher: shared by all blocks; its device is the model's.
        seed: of all weights.
        device: of the model.
    """

    def __init__(self, sizes: ModelSizes, dispatcher: TokenDispatcher, seed: int, device: torch.device) -> None:
        super().__init__()
        self.first_expert_id = dispatcher.ep_rank * dispatcher.num_local_experts
        self.ep_size = dispatcher.ep_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # drawn on the CPU: the same numbers on every device
            self.tokens = nn.Embedding(NUM_BYTES, sizes.hidden_dim)
            self.blocks = nn.ModuleList(
                Block(sizes, dispatcher, f"blocks.{i}.moe", seed * sizes.num_layers + i)
                for i in range(sizes.num_layers)
            )
            self.norm = nn.LayerNorm(sizes.hidden_dim)
            self.head = nn.Linear(sizes.hidden_dim, NUM_BYTES, bias=False)
            # Bytes that differ much from the start: the routers can tell them apart, and no expert takes them all.
            nn.init.normal_(self.tokens.weight, std=0.5)
            for block in self.each_block():
                nn.init.normal_(block.moe.router.weight, std=0.02)
        self.to(device)

    def forward(
        self, tokens: Tensor, sharding: SequenceSharding | None = None, num_tokens_per_rank: int | None = None
    ) -> Output:
        """Run the model on this rank's tokens.

        Args:
            tokens: `[B, s]` int64: whole sequences, or this rank's shard of each.
            sharding: how the sequences are shared; None: each rank has whole ones of its own.
            num_tokens_per_rank: passed to every dispatch.
        """
        sharding = sharding or SequenceSharding(tokens.shape[1])
        x, counts = self.embed(tokens), []
        for block in self.blocks:
            x, tokens_per_expert = block(x, sharding, num_tokens_per_rank)
            counts.append(tokens_per_expert)
        return Output(self.read_out(x), torch.stack(counts))

    def embed(self, tokens: Tensor) -> Tensor:
        """`[B, s, hidden_dim]` from bytes `[B, s]`."""
        embedded: Tensor = self.tokens(tokens)
        return embedded

    def read_out(self, x: Tensor) -> Tensor:
        """Logits `[..., 256]` from tokens `[..., hidden_dim]`."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def attach(self, dispatcher: TokenDispatcher) -> None:
        """Let all blocks use another dispatcher of the same group size from now on."""
        for block in self.each_block():
            block.moe.layer = dispatcher.layer(block.name)

    def each_block(self) -> list[Block]:
        """The blocks, with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank has a copy of."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." not in name]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's experts, each `[num_local_experts, ...]`."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." in name]

    def num_parameters(self) -> int:
        """Of the whole model, experts of all ranks included."""
        of_experts = sum(parameter.numel() for parameter in self.expert_parameters())
        return sum(parameter.numel() for parameter in self.dense_parameters()) + of_experts * self.ep_size

    def balance(self, tokens_per_expert: Tensor) -> None:
        """Move the routers' biases by the loads `[num_layers, num_experts]` of all ranks together."""
        for block, load in zip(self.each_block(), tokens_per_expert, strict=True):
            bias = block.get_buffer("expert_bias")
            bias.copy_(update_bias(bias, load, _BALANCE_SPEED))
