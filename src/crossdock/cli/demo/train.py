"""The main job: train the transformer with its experts spread over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch
import torch.distributed as dist

from crossdock import TokenDispatcher

from ..output import counted
from .claims import Claim
from .data import Text, load_text
from .evaluate import batch_of, held_out_loss
from .layers import layer_lines
from .model import Transformer
from .parallel import device_of_rank
from .progress import TrainingDisplay
from .prove_checkpoint import save_and_reload
from .settings import Job
from .step import StepResult, training_step

_LEARNING_RATE = 4e-3
_WARM_UP_STEPS = 20
_FINAL_RATE = 0.1


@dataclass(frozen=True)
class Trained:
    """What training gave, by step where it is a list.

    Attributes:
        source: where the text came from.
        num_bytes: of text to learn from.
        num_parameters: of the whole model.
        num_ranks: ranks it ran on.
        device: type of device, "cpu" or "cuda".
        backend: the dispatcher's.
        losses: nats per byte.
        gradient_norms: before clipping.
        tokens_per_s: tokens of all ranks a second.
        tokens_per_expert: by step, layer and expert.
        held_out_before: loss on text that is never trained on, before the first step.
        held_out_after: and after the last.
        sent_bytes: what rank 0's dispatcher put on the wire in a step, on average.
        claims: what was shown on the way.
    """

    source: str
    num_bytes: int
    num_parameters: int
    num_ranks: int
    device: str
    backend: str
    losses: list[float]
    gradient_norms: list[float]
    tokens_per_s: list[float]
    tokens_per_expert: list[list[list[int]]]
    held_out_before: float
    held_out_after: float
    sent_bytes: float
    claims: list[Claim]


def train(rank: int, job: Job) -> Trained:
    """Train, save and reload; every rank returns the same."""
    text, device, num_ranks = load_text(job.data), device_of_rank(), dist.get_world_size()
    config = job.sizes.dispatcher_config(job.num_sequences, "fast")
    with TokenDispatcher(config, backend=job.backend) as dispatcher:
        model = Transformer(job.sizes, dispatcher, job.seed, device)
        before = held_out_loss(model, text, job)
        sent = dispatcher.stats().sent_bytes
        steps = _training(rank, job, model, text)
        sent = dispatcher.stats().sent_bytes - sent
        after = held_out_loss(model, text, job)
        learned = Claim(
            "the model learns real text",
            f"{counted(job.steps, 'step')} on {counted(num_ranks, 'rank')}, experts spread over them; loss on held-out"
            " text",
            after < before,
            f"{before:.3f} before, {after:.3f} after",
            layers=layer_lines("training", dispatcher),
        )
        return Trained(
            source=text.source,
            num_bytes=len(text.train),
            num_parameters=model.num_parameters(),
            num_ranks=num_ranks,
            device=device.type,
            backend=dispatcher.backend_name,
            losses=[float(result.loss) for result, _ in steps],
            gradient_norms=[float(result.gradient_norm) for result, _ in steps],
            tokens_per_s=[num_ranks * config.num_max_tokens_per_rank / seconds for _, seconds in steps],
            tokens_per_expert=[result.tokens_per_expert.tolist() for result, _ in steps],
            held_out_before=before,
            held_out_after=after,
            sent_bytes=sent / job.steps,
            claims=[learned, save_and_reload(rank, job, model, text)],
        )


def _training(rank: int, job: Job, model: Transformer, text: Text) -> list[tuple[StepResult, float]]:
    """All steps, each with its seconds."""
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(job.steps))
    generator = torch.Generator().manual_seed(1000 * job.seed + rank)
    num_tokens = job.num_sequences * job.sizes.seq_len
    steps = []
    with TrainingDisplay(job.steps, shown=rank == 0) as display:
        for step in range(job.steps):
            start = time.perf_counter()
            batch = batch_of(text.batch(job.num_sequences, job.sizes.seq_len, generator))
            result = training_step(model, optimizer, batch, num_tokens_per_rank=num_tokens)
            loss = float(result.loss)  # waits for the device, so that the time below is the step's
            schedule.step()
            seconds = time.perf_counter() - start
            display.show(step, loss, batch.num_tokens / seconds, result.tokens_per_expert.tolist())
            steps.append((result, seconds))
    return steps


def learning_rate_factor(steps: int) -> Callable[[int], float]:
    """Up in a straight line, then down along half a cosine to a tenth."""
    warm_up = min(_WARM_UP_STEPS, max(1, steps // 4))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return _FINAL_RATE + (1 - _FINAL_RATE) * (1 + cos(pi * done)) / 2

    return factor
