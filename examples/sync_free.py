"""Train without waiting for counts: capacities that are measured once, and a step that lacks rows is not applied.

    python examples/sync_free.py
    python examples/sync_free.py --hot-step 5

A mixture-of-experts layer is sharded over two ranks of this machine. Its first dispatch is sized by its counts and
measures them; all later ones have a size that is known beforehand, so on a GPU nothing waits for the device (over Gloo,
as here, counts still travel). In one step, which the dial chooses, all tokens want the same two experts: rows do not
fit, the guard leaves the step out on both ranks, and the capacity grows. The next step's tokens want the same, and fit.

In the end the example compares with a run that had room for everything and left out the same step: no bit differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossdock as cd
from crossdock.nn import GroupedExperts
from crossdock.testing import run_ranks

NUM_RANKS, NUM_STEPS, NUM_TOKENS = 2, 8, 32
NUM_EXPERTS, TOP_K, HIDDEN_DIM = 8, 2, 64

CONFIG = cd.DispatcherConfig(
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    hidden_dim=HIDDEN_DIM,
    dtype=torch.float32,
    num_max_tokens_per_rank=NUM_TOKENS,
    row_capacity=cd.RowCapacity.calibrated(1.5),
    on_overflow="skip_step",
)


@dataclass(frozen=True)
class Step:
    """What one step of one rank looked like."""

    num_rows: int
    num_wanted: int
    skipped: bool


class Layer(nn.Module):
    """Experts behind a dispatcher; which tokens want which is given, how much is learnt."""

    def __init__(self, dispatcher: cd.TokenDispatcher) -> None:
        super().__init__()
        self.layer = dispatcher.layer("moe")
        num_local = dispatcher.num_local_experts
        first = dispatcher.ep_rank * num_local
        self.experts = GroupedExperts(num_local, HIDDEN_DIM, 2 * HIDDEN_DIM, seed=0, first_expert_id=first)
        self.router = nn.Parameter(torch.zeros(HIDDEN_DIM, NUM_EXPERTS))
        self.num_rows = 0

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ self.router).gather(1, expert_ids)
        routed = self.layer.dispatch(x, scores, expert_ids)
        self.num_rows = routed.rows.shape[0]
        return x + self.layer.combine(self.experts(routed.rows, routed.expert_offsets), routed.handle)


def batch(rank: int, step: int, hot_step: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens, and the experts that each wants; in `hot_step` and the one behind it, experts 0 and 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    wanted = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    if step in (hot_step, hot_step + 1):
        wanted = torch.tensor([[0, 1]]).repeat(NUM_TOKENS, 1)
    return torch.randn(NUM_TOKENS, HIDDEN_DIM, generator=generator), wanted


def backward(model: Layer, x: Tensor, expert_ids: Tensor) -> None:
    """Gradients of the mean loss over ranks: experts get those of all ranks' tokens, the router's are added up."""
    (model(x, expert_ids).square().mean() / NUM_RANKS).backward()
    dist.all_reduce(model.router.grad)


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


def guarded(rank: int, hot_step: int) -> tuple[list[Step], list[Tensor]]:
    """Train with a measured capacity; what each step looked like, and the bits in the end."""
    steps = []
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        model = Layer(dispatcher)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        guard = cd.OverflowGuard([dispatcher], optimizer)
        for number in range(NUM_STEPS):
            wanted, skipped = dispatcher.stats().layers["moe"].rows_wanted if number else 0, guard.num_skipped()
            optimizer.zero_grad()
            backward(model, *batch(rank, number, hot_step))
            guard.step()  # instead of optimizer.step()
            wanted = dispatcher.stats().layers["moe"].rows_wanted - wanted
            steps.append(Step(model.num_rows, wanted, guard.num_skipped() > skipped))
        return steps, bits_of(model, optimizer)


def with_room(rank: int, hot_step: int) -> list[Tensor]:
    """The same with room for everything from the start, and `hot_step` left out by hand."""
    roomy = dataclasses.replace(CONFIG, row_capacity=cd.RowCapacity.worst_case(), on_overflow="raise")
    with cd.TokenDispatcher(roomy) as dispatcher:
        model = Layer(dispatcher)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(model, *batch(rank, number, hot_step))
            if number != hot_step:
                optimizer.step()
        return bits_of(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hot-step", type=int, default=3, help="in which all tokens want the same two experts")
    hot_step = parser.parse_args().hot_step
    if not 1 <= hot_step <= NUM_STEPS - 2:
        parser.error(f"--hot-step must be from 1 to {NUM_STEPS - 2}, got {hot_step}")

    ranks = run_ranks(guarded, NUM_RANKS, hot_step)
    print("step   rows wanted   capacity   (each on rank 0 and 1)")
    for number, of_ranks in enumerate(zip(*[steps for steps, _ in ranks], strict=True)):
        wanted = ", ".join(f"{step.num_wanted:>3}" for step in of_ranks)
        capacity = ", ".join(f"{step.num_rows:>3}" for step in of_ranks)
        verdict = "not applied on any rank: rows were dropped" if all(step.skipped for step in of_ranks) else ""
        print(f"{number:>4}   {wanted:>11}   {capacity:>8}   {verdict}")

    roomy = run_ranks(with_room, NUM_RANKS, hot_step)
    pairs = [pair for (_, bits), room in zip(ranks, roomy, strict=True) for pair in zip(bits, room, strict=True)]
    same = all(torch.equal(found, wanted) for found, wanted in pairs)
    print("against a run with room for everything that left out the same step:")
    print(f"  parameters and optimizer state   {'same bits' if same else 'DIFFERENT'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
