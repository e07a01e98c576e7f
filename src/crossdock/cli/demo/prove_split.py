"""EP 1 on the concatenated batch against the same batch in parts over all ranks: the same bits everywhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock import TokenDispatcher

from .claims import Claim, Comparison, on_ranks
from .data import load_text
from .evaluate import batch_of
from .model import Transformer
from .parallel import device_of_rank, gathered
from .settings import Job
from .step import Batch, loss_of_rank, sum_dense_gradients
from .together import Recorder, dispatcher_alone, forward_parts

_OF_TOKENS = ("x", "scores", "outputs", "dx", "dscores", "doutputs")
_OF_ROWS = ("rows", "expert_rows", "drows", "dexpert_rows")


def prove_split(rank: int, job: Job) -> list[Claim]:
    """Run one training step both ways and compare every tensor that passes a dispatcher, and every gradient."""
    generator = torch.Generator().manual_seed(1000 * job.seed + 500 + rank)
    batch = batch_of(load_text(job.data).batch(job.num_sequences, job.sizes.seq_len, generator))
    num_ranks, comparison = dist.get_world_size(), Comparison()
    config = job.sizes.dispatcher_config(job.num_sequences, "exact")
    with TokenDispatcher(config, backend=job.backend) as spread:
        model = Transformer(job.sizes, spread, job.seed, device_of_rank())
        in_parts = _record(model)
        loss = loss_of_rank(model(batch.inputs).logits, batch)
        loss.backward()
        sum_dense_gradients(model)
    # Every rank computes the whole of it and looks at its own part.
    with dispatcher_alone(job.sizes.dispatcher_config(num_ranks * job.num_sequences, "exact")) as alone:
        copies = [Transformer(job.sizes, alone, job.seed, device_of_rank()) for _ in range(num_ranks)]
        together = _record(copies[0])
        losses = _backward_of_parts(copies, batch)
    comparison.add("loss", loss, losses[rank])
    for layer, (part, whole) in enumerate(zip(in_parts, together, strict=True)):
        comparison.add_all(f"layer {layer}", part.seen(), _share_of(whole, rank, part))
    _compare_gradients(comparison, model, copies)
    claim = "EP 1 and EP N are the same computation: rows, outputs, gradients"
    how = f"one batch on one rank against its parts on {on_ranks(num_ranks, batch.inputs.device)}, forward and backward"
    return [comparison.claim(claim.replace("EP N", f"EP {num_ranks}"), how)]


def _record(model: Transformer) -> list[Recorder]:
    recorders = []
    for block in model.each_block():
        recorder = Recorder(block.moe.layer)
        block.moe.layer = recorder
        recorders.append(recorder)
    return recorders


def _backward_of_parts(copies: list[Transformer], batch: Batch) -> list[Tensor]:
    """Each part's share of the loss, after one backward through all of them."""
    inputs, targets = gathered(batch.inputs), gathered(batch.targets)
    logits = forward_parts(copies, inputs)
    losses = [loss_of_rank(part, Batch(inputs[i], targets[i], batch.num_tokens)) for i, part in enumerate(logits)]
    torch.autograd.backward(losses)
    return losses


def _share_of(whole: Recorder, rank: int, part: Recorder) -> dict[str, Tensor]:
    """What this rank's recorder should have seen: its tokens, and the rows of its experts."""
    seen, counts = whole.seen(), whole.tokens_per_expert
    num_local = len(part.tokens_per_expert)
    first, end = rank * num_local, (rank + 1) * num_local
    rows = slice(int(counts[:first].sum()), int(counts[:end].sum()))
    num_tokens = len(part.seen()["x"])
    tokens = slice(rank * num_tokens, (rank + 1) * num_tokens)
    share = {name: seen[name][tokens] for name in _OF_TOKENS} | {name: seen[name][rows] for name in _OF_ROWS}
    return share


def _compare_gradients(comparison: Comparison, model: Transformer, copies: list[Transformer]) -> None:
    """Experts' gradients as they are; the copies' dense gradients summed in the order of the parts."""
    first = model.first_expert_id
    by_copy = [dict(copy.named_parameters()) for copy in copies]
    for name, parameter in model.named_parameters():
        grads = [_grad(parameters[name]) for parameters in by_copy]
        if ".experts." in name:
            expected = grads[0][first : first + parameter.shape[0]]
        else:
            expected = grads[0].clone()
            for grad in grads[1:]:
                expected += grad
        comparison.add(f"gradient of {name}", _grad(parameter), expected)


def _grad(parameter: torch.nn.Parameter) -> Tensor:
    # The experts of all copies but the first take part in nothing and have no gradient.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
