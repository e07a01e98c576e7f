"""Training with sharded sequences: the caller's bound on tokens and the group's own give the same bits."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock import TokenDispatcher
from crossdock.capacity import for_pretraining

from .claims import Claim, Comparison, on_ranks
from .data import Text, load_text
from .model import Transformer
from .parallel import SequenceSharding, device_of_rank
from .settings import Job
from .step import Batch, training_step

TENSOR_PARALLEL = 2
STEPS = 10
_NUM_SEQUENCES = 2  # of one data-parallel rank
_SEQ_LEN = 61  # does not divide by 2: the second rank of each pair holds fewer tokens than the first


def prove_sharded(rank: int, job: Job) -> list[Claim]:
    """Train twice, once with `num_tokens_per_rank` and once without, on a multiple of `TENSOR_PARALLEL` ranks."""
    text, sharding = load_text(job.data), _sharding(rank)
    bound = for_pretraining(_NUM_SEQUENCES, _SEQ_LEN, tensor_parallel_degree=TENSOR_PARALLEL)
    given = _train(rank, job, text, sharding, bound)
    left_out = _train(rank, job, text, sharding, None)
    comparison = Comparison()
    for step in range(STEPS):
        comparison.add(f"loss of step {step}", left_out[0][step], given[0][step])
        comparison.add(f"gradient norm of step {step}", left_out[1][step], given[1][step])
    num_ranks = dist.get_world_size()
    fewest = _NUM_SEQUENCES * (_SEQ_LEN - (TENSOR_PARALLEL - 1) * sharding.width)
    found = comparison.claim(
        f"num_tokens_per_rank given or left out: the same {STEPS} training steps",
        f"sequences of {_SEQ_LEN} over tensor parallelism {TENSOR_PARALLEL} x data parallelism"
        f" {num_ranks // TENSOR_PARALLEL} = EP {num_ranks}, {bound} and {fewest} tokens a rank,"
        f" {on_ranks(num_ranks, device_of_rank())}; loss and gradient norm of each step",
    )
    first, last = float(given[0][0]), float(given[0][-1])
    result = f"{STEPS} losses ({first:.4f} to {last:.4f}) and {STEPS} gradient norms: the same bits on every rank"
    return [replace(found, result=result) if found.holds else found]


def _sharding(rank: int) -> SequenceSharding:
    """The place of this rank in its tensor-parallel group: 0 and 1, 2 and 3, ...; every rank makes all groups."""
    ranks = range(dist.get_world_size())
    groups = [dist.new_group(list(ranks[i : i + TENSOR_PARALLEL])) for i in ranks[::TENSOR_PARALLEL]]
    return SequenceSharding(_SEQ_LEN, rank % TENSOR_PARALLEL, TENSOR_PARALLEL, groups[rank // TENSOR_PARALLEL])


def _train(
    rank: int, job: Job, text: Text, sharding: SequenceSharding, num_tokens_per_rank: int | None
) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms by step, `[STEPS]` float32 each."""
    generator = torch.Generator().manual_seed(1000 * job.seed + 700 + rank // TENSOR_PARALLEL)
    results = []
    # Room for whole sequences: what a rank brings, and what a call is told, are less than the lifetime's bound.
    config = job.sizes.dispatcher_config(_NUM_SEQUENCES, "exact")
    with TokenDispatcher(config, backend=job.backend) as dispatcher:
        model = Transformer(job.sizes, dispatcher, job.seed, device_of_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            sequences = text.batch(_NUM_SEQUENCES, _SEQ_LEN, generator)
            results.append(training_step(model, optimizer, _shard(sequences, sharding), num_tokens_per_rank))
    return torch.stack([result.loss for result in results]), torch.stack([result.gradient_norm for result in results])


def _shard(sequences: Tensor, sharding: SequenceSharding) -> Batch:
    """The tokens of this rank, of sequences `[B, length + 1]` that its tensor-parallel group shares."""
    sequences = sequences.to(device_of_rank())
    num_tokens = dist.get_world_size() // sharding.size * sequences.shape[0] * sharding.length
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    return Batch(inputs[:, sharding.shard], targets[:, sharding.shard], num_tokens, sharding)
