"""What every rank runs, under `torchrun` on two hosts or started by a test on one: train, then step until cut off."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise imported in the first call, at a time of its own on every rank
import torch.distributed as dist

import crossdock as cd

TIMEOUT_S = 2.0
HIDDEN, NUM_EXPERTS, TOP_K = 16, 8, 3


def opened(timeout_s: float) -> cd.TokenDispatcher:
    config = cd.DispatcherConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_dim=HIDDEN,
        dtype=torch.float32,
        num_max_tokens_per_rank=64,
        reduction="exact",
        timeout_s=timeout_s,
    )
    return cd.TokenDispatcher(config)


def train(rank: int, steps: int = 5) -> list[str]:
    """Digests of output, gradients and weights after every step; data, routing and weights are fixed by the rank."""
    generator = torch.Generator().manual_seed(rank)
    digests = []
    with opened(timeout_s=20.0) as dispatcher:
        weights = torch.randn(dispatcher.num_local_experts, HIDDEN, HIDDEN, generator=generator, requires_grad=True)
        for turn in range(steps):
            num_tokens = 5 + 7 * turn + rank
            x = torch.randn(num_tokens, HIDDEN, generator=generator, requires_grad=True)
            logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
            scores, ids = torch.softmax(logits, 1).topk(TOP_K)
            routed = dispatcher.layer("moe").dispatch(x, scores, ids)
            groups = routed.rows.split(routed.tokens_per_expert.tolist())
            rows = torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])
            out = dispatcher.layer("moe").combine(rows, routed.handle)
            out.square().sum().backward()
            assert x.grad is not None
            assert weights.grad is not None
            digests.append(_digest(out, x.grad, weights.grad))
            with torch.no_grad():
                weights -= 1e-3 * weights.grad
            weights.grad = None
    return digests


def step_until_cut_off(rank: int, started: Path) -> dict[str, Any]:
    dispatcher = opened(TIMEOUT_S)
    x = torch.ones(4, HIDDEN)
    ids = torch.arange(12).reshape(4, 3) % NUM_EXPERTS
    begun = time.monotonic()
    try:
        while True:
            begun = time.monotonic()
            routed = dispatcher.layer("moe").dispatch(x, torch.ones(4, 3), ids)
            assert torch.equal(dispatcher.layer("moe").combine(routed.rows, routed.handle), 3 * x)
            started.touch()
    except cd.PeerTimeout as error:
        took_s = time.monotonic() - begun
        closing = time.monotonic()
        dispatcher.close()
        return {
            "ranks": error.ranks,
            "message": str(error),
            "took_s": took_s,
            "close_s": time.monotonic() - closing,
        }


def _digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _write(folder / f"trained{rank}.json", train(rank))
    _write(folder / f"cut{rank}.json", step_until_cut_off(rank, folder / f"started{rank}"))
    os._exit(0)  # the launcher's own farewell needs the other host


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
