"""The trained model is written, read back, and run on one rank: the same bits as on the ranks that trained it."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock import TokenDispatcher

from ..output import counted
from . import checkpoint
from .claims import Claim, Comparison
from .data import Text
from .evaluate import held_out_batches
from .model import Transformer
from .parallel import device_of_rank, gathered
from .settings import Job
from .together import dispatcher_alone, forward_parts

FILE_NAME = "model.safetensors"


@torch.no_grad()
def save_and_reload(rank: int, job: Job, model: Transformer, text: Text) -> Claim:
    """Save from rank 0, load there again, and compare weights and held-out logits; every rank takes part."""
    state, path = checkpoint.whole_state(model), job.out / FILE_NAME
    trained = _logits_of_all_ranks(rank, job, model, text)
    if rank == 0:
        checkpoint.save(path, state, job.sizes)
    comparison = Comparison()
    with dispatcher_alone(job.sizes.dispatcher_config(len(trained) * job.num_sequences, "exact")) as alone:
        if rank == 0:
            loaded, sizes = checkpoint.load(path)
            comparison.add_all("weights", loaded, state)
            # Another seed: nothing of the result may come from anywhere but the file.
            fresh = Transformer(sizes, alone, job.seed + 1, device_of_rank())
            checkpoint.load_into(fresh, loaded)
            parts = [held_out_batches(text, job, part)[0].inputs for part in range(len(trained))]
            for part, logits in enumerate(forward_parts([fresh] * len(parts), parts)):
                comparison.add(f"logits of rank {part}'s text", logits, trained[part])
    return comparison.claim(
        "the checkpoint is the model",
        f"{FILE_NAME} loaded again on one rank; its weights, and its logits on held-out text, against those of"
        f" {counted(len(trained), 'rank')}",
    )


def _logits_of_all_ranks(rank: int, job: Job, model: Transformer, text: Text) -> list[Tensor]:
    """The first held-out batch's logits by rank, with the exact reduction; the model keeps the dispatcher it had."""
    layers = [block.moe.layer for block in model.each_block()]
    with TokenDispatcher(job.sizes.dispatcher_config(job.num_sequences, "exact"), backend=job.backend) as exact:
        model.attach(exact)
        logits = gathered(model(held_out_batches(text, job, rank)[0].inputs).logits)
    for block, layer in zip(model.each_block(), layers, strict=True):
        block.moe.layer = layer
    return logits
