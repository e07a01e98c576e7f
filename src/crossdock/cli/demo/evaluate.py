"""Loss on text that is held out of training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .data import Text
from .model import Transformer
from .parallel import device_of_rank, summed_in_rank_order
from .settings import Job
from .step import Batch, loss_of_rank

_NUM_BATCHES = 4


def batch_of(sequences: Tensor) -> Batch:
    """Whole sequences `[B, seq_len + 1]` of this rank as a batch on its device; every rank has as many."""
    sequences = sequences.to(device_of_rank())
    num_tokens = dist.get_world_size() * sequences.shape[0] * (sequences.shape[1] - 1)
    return Batch(sequences[:, :-1], sequences[:, 1:], num_tokens)


def held_out_batches(text: Text, job: Job, rank: int) -> list[Batch]:
    """The same sequences each time, others for each rank."""
    generator = torch.Generator().manual_seed(1000 * job.seed + 999 - rank)
    return [
        batch_of(text.batch(job.num_sequences, job.sizes.seq_len, generator, held_out=True))
        for _ in range(_NUM_BATCHES)
    ]


@torch.no_grad()
def held_out_loss(model: Transformer, text: Text, job: Job) -> float:
    """The mean over the held-out batches of all ranks, nats per byte."""
    losses = [loss_of_rank(model(batch.inputs).logits, batch) for batch in held_out_batches(text, job, dist.get_rank())]
    return float(summed_in_rank_order(torch.stack(losses).sum())) / len(losses)
