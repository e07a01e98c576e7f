"""Train a small byte-level mixture-of-experts transformer on two ranks of this machine.

    python examples/train.py
    python examples/train.py --depth 4

The text is the standard library's source. Dense parts are data-parallel, the experts of every layer are sharded over
the ranks, and all layers share one dispatcher. One dial, the depth, sets the model's size: its width is 32 times that.
Routing is balanced without an auxiliary loss, by a bias that moves towards experts with little load.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossdock as cd
from crossdock.capacity import for_pretraining
from crossdock.nn import GroupedExperts, MoE, MoEResult
from crossdock.routing import Routing, count_tokens_per_expert, sigmoid_topk, update_bias
from crossdock.testing import run_ranks

NUM_RANKS, NUM_STEPS = 2, 60
BATCH_SIZE, SEQ_LEN = 8, 96  # of one rank
NUM_EXPERTS, TOP_K = 8, 2
BIAS_SPEED = 0.01


class BalancedRouting(nn.Module):
    """Sigmoid top-k whose selection is biased towards experts that had little load."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))

    def forward(self, logits: Tensor) -> Routing:
        return sigmoid_topk(logits, TOP_K, bias=self.bias)


class Block(nn.Module):
    """Causal attention, then a mixture of experts, both with residuals."""

    def __init__(self, dispatcher: cd.TokenDispatcher, index: int, width: int) -> None:
        super().__init__()
        self.num_heads = width // 32
        self.norm_attention, self.norm_moe = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        num_local = dispatcher.num_local_experts
        experts = GroupedExperts(
            num_local, width, 2 * width, seed=index, first_expert_id=dispatcher.ep_rank * num_local
        )
        self.moe = MoE(
            dispatcher.layer(f"blocks.{index}.moe"),  # its name is in every error
            nn.Linear(width, NUM_EXPERTS, bias=False),
            experts,
            routing=BalancedRouting(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(self.norm_attention(x))
        found: MoEResult = self.moe(self.norm_moe(x), return_routing=True)
        return x + found.out, count_tokens_per_expert(found.routing.topk_expert_ids, NUM_EXPERTS)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Model(nn.Module):
    """Bytes in, logits of the next byte out, with the experts' loads by layer."""

    def __init__(self, dispatcher: cd.TokenDispatcher, depth: int) -> None:
        super().__init__()
        width = dispatcher.config.hidden_dim
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(SEQ_LEN, width)
        self.blocks = nn.ModuleList(Block(dispatcher, index, width) for index in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embed(text) + self.place.weight[: text.shape[1]]
        loads = []
        for block in self.blocks:
            x, load = block(x)
            loads.append(load)
        return self.head(self.norm(x)), loads

    def expert_parameters(self) -> set[nn.Parameter]:
        return {parameter for name, parameter in self.named_parameters() if ".moe.experts." in name}


def average_gradients(model: Model) -> None:
    """Make every gradient that of the mean loss over ranks.

    Dense parameters are copies: average them. An expert lives on one rank, and combine's backward has already brought
    it the gradients of all ranks' tokens: only divide.
    """
    experts = model.expert_parameters()
    for parameter in model.parameters():
        assert parameter.grad is not None, "no loss has come to it"
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def balance(model: Model, loads: list[Tensor]) -> float:
    """Move every layer's selection bias; return the busiest expert's load as a multiple of the mean."""
    total = torch.stack(loads)
    dist.all_reduce(total)
    for index, load in enumerate(total):
        bias = model.get_buffer(f"blocks.{index}.moe.routing.bias")
        bias.copy_(update_bias(bias, load, BIAS_SPEED))
    return float((total.amax(1) / total.float().mean(1)).mean())


def read_text() -> Tensor:
    folder = Path(os.__file__).parent
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(rank: int, depth: int) -> list[float]:
    """Train on this rank; returns the loss of every step, the mean over ranks."""
    torch.manual_seed(0)  # dense parameters are the same on every rank
    text, losses = read_text(), []
    config = cd.DispatcherConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_dim=32 * depth,
        dtype=torch.float32,
        num_max_tokens_per_rank=for_pretraining(BATCH_SIZE, SEQ_LEN),
        timeout_s=60,
    )
    with cd.TokenDispatcher(config) as dispatcher:
        model = Model(dispatcher, depth)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
        batches = torch.Generator().manual_seed(1 + rank)  # each rank reads its own part of the text
        for step in range(NUM_STEPS):
            starts = torch.randint(len(text) - SEQ_LEN - 1, (BATCH_SIZE,), generator=batches)
            window = torch.stack([text[start : start + SEQ_LEN + 1] for start in starts.tolist()])
            logits, loads = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
            losses.append(float(mean_loss))
            imbalance = balance(model, loads)
            if rank == 0 and step % 10 == 9:
                print(
                    f"step {step + 1:3}: loss {losses[-1]:.3f}, busiest expert {imbalance:.2f} x the mean", flush=True
                )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=2, help="layers; the width is 32 times that (default 2)")
    depth = parser.parse_args().depth
    if depth < 1:
        parser.error(f"--depth must be at least 1, got {depth}")

    losses = run_ranks(train, NUM_RANKS, depth, timeout_s=600)[0]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss of the first five steps {first:.3f}, of the last five {last:.3f}")
    if not last < first - 1:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
