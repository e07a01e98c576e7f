"""Replay under activation checkpointing: a recomputed dispatch has the layout of its forward, and waits for nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossdock as cd
from crossdock import recompute
from crossdock.nn import GroupedExperts, MoE
from crossdock.recompute.frames import Frame, Recorded
from crossdock.routing import softmax_topk
from crossdock.testing import Seat, assert_bit_equal
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, refused

HIDDEN_DIM, NUM_EXPERTS, TOP_K = 16, 4, 2
CONFIG = make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM)
DISPATCH, COMBINE = torch.ops.crossdock.dispatch.default, torch.ops.crossdock.combine.default

Block = Callable[[Tensor], Tensor]
Checkpoint = Callable[[Block, Tensor], Tensor]


def saving(*operators: Any) -> recompute.ContextFn:
    return partial(create_selective_checkpoint_contexts, list(operators))


def plain(block: Block, x: Tensor) -> Tensor:
    return block(x)


def without_replay(block: Block, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False)
    return out


def reentrant_without_replay(block: Block, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=True)
    return out


def non_reentrant(block: Block, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False, context_fn=recompute.context_fn)
    return out


def reentrant(block: Block, x: Tensor) -> Tensor:
    out: Tensor = recompute.checkpoint(block, x, use_reentrant=True)
    return out


def to_the_end(block: Block, x: Tensor) -> Tensor:
    out: Tensor = recompute.checkpoint(block, x, early_stop=False)
    return out


def selective(block: Block, x: Tensor) -> Tensor:
    out: Tensor = recompute.checkpoint(block, x, context_fn=saving(torch.ops.aten.mm.default))
    return out


WAYS = {"non-reentrant": non_reentrant, "reentrant": reentrant, "to the end": to_the_end, "selective": selective}
KINDS = {"non-reentrant": non_reentrant, "reentrant": reentrant}
both_kinds = pytest.mark.parametrize("kind", KINDS)


def make_blocks(dispatcher: cd.TokenDispatcher, num_layers: int) -> torch.nn.ModuleList:
    """MoE layers with the same weights in every run; each is called with one tensor."""
    hidden_dim, num_experts = dispatcher.config.hidden_dim, dispatcher.config.num_experts
    routers = [torch.nn.Linear(hidden_dim, num_experts, bias=False) for _ in range(num_layers)]
    generator = torch.Generator().manual_seed(0)  # the router is the same on every rank, and ranks may be threads
    for router in routers:
        torch.nn.init.normal_(router.weight, std=0.3, generator=generator)
    num_local = dispatcher.num_local_experts
    first = dispatcher.ep_rank * num_local
    return torch.nn.ModuleList(
        MoE(
            dispatcher.layer(f"blocks.{number}"),
            router,
            GroupedExperts(
                num_local, hidden_dim, 32, seed=number, first_expert_id=first, dtype=dispatcher.config.dtype
            ),
            routing=partial(softmax_topk, top_k=dispatcher.config.top_k),
        )
        for number, router in enumerate(routers)
    )


def tokens(num_tokens: int, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(num_tokens, HIDDEN_DIM, generator=generator, requires_grad=True)


def squaring(layer: cd.LayerView, ids: Callable[[], Tensor]) -> Block:
    """A region of one layer: experts that square, each with a factor of its own, and ids from a stub."""
    num_local, num_experts = layer.dispatcher.num_local_experts, layer.dispatcher.config.num_experts
    factors = 1 + (layer.dispatcher.ep_rank * num_local + torch.arange(num_local)) / num_experts

    def block(x: Tensor) -> Tensor:
        x = x.clone()  # the region's gradients are added up before they meet others, in every run
        routed = layer.dispatch(x, x[:, :TOP_K].sigmoid(), ids())
        factor = factors.repeat_interleave(routed.tokens_per_expert).unsqueeze(1)
        return layer.combine(routed.rows * routed.rows * factor, routed.handle)

    return block


@dataclass
class Counted:
    """What a dispatcher counted while something ran."""

    calls: int = 0
    host_syncs: int = 0
    tokens: int = 0
    rows: int = 0


def count(dispatcher: cd.TokenDispatcher, run: Callable[[], Any]) -> Counted:
    before = dispatcher.stats()
    run()
    after = dispatcher.stats()
    return Counted(*(getattr(after, name) - getattr(before, name) for name in vars(Counted())))


# -- nothing changes, and nothing waits --------------------------------------------------------------------------------


def train_once(dispatcher: cd.TokenDispatcher, way: Checkpoint, num_layers: int = 2) -> tuple[list[Tensor], Counted]:
    """Two micro-batches in flight: all gradients, and what their backwards counted."""
    blocks = make_blocks(dispatcher, num_layers)
    inputs, losses = [], []
    for step, lengths in enumerate(((7, 3, 0, 5), (0, 5, 4, 4))):
        x = tokens(lengths[dispatcher.ep_rank], step, dispatcher.ep_rank)
        h = x
        for block in blocks:
            h = h + way(block, h)
        inputs.append(x)
        losses.append(h.square().sum())
    counted = count(dispatcher, lambda: [loss.backward() for loss in losses])
    grads = [value.grad for value in (*inputs, *blocks.parameters())]
    return [grad for grad in grads if grad is not None], counted


def same_bits(seat: Seat) -> None:
    with seat.open(CONFIG) as dispatcher:
        expected, _ = train_once(dispatcher, plain)
        for name, way in WAYS.items():
            actual, counted = train_once(dispatcher, way)
            # For each of 2 layers in 2 micro-batches: replayed dispatch, combine, and the backward of both.
            assert counted == Counted(calls=16), f"{name}: {counted}"
            assert len(actual) == len(expected)
            for grad, wanted in zip(actual, expected, strict=True):
                assert_bit_equal(grad, wanted, f"gradient, {name}")


@every_backend()
def test_gradients_have_the_same_bits_and_the_recomputation_waits_for_nothing(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(same_bits)


def same_rows(seat: Seat) -> None:
    config = make_config(16, 4, 64, dtype=torch.bfloat16, expert_alignment=8)
    seen: list[tuple[Tensor, ...]] = []
    with seat.open(config) as dispatcher:
        layer = dispatcher.layer("moe")

        def region(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
            routed = layer.dispatch(x, scores, ids)
            parts = (routed.rows, routed.scores, routed.tokens_per_expert, routed.expert_offsets)
            seen.append(tuple(part.detach().clone() for part in parts))
            return layer.combine(routed.rows * routed.rows, routed.handle)

        for step in range(50):
            generator = torch.Generator().manual_seed(100 * step + seat.rank)
            num_tokens = (37, 64, 5, 0)[seat.rank]
            x = torch.randn(num_tokens, 64, generator=generator).to(torch.bfloat16).requires_grad_()
            ids = torch.randint(0, 16, (num_tokens, 4), generator=generator)
            out = torch_checkpoint(
                region, x, torch.rand(num_tokens, 4), ids, use_reentrant=False, context_fn=recompute.context_fn
            )
            assert count(dispatcher, out.float().sum().backward).host_syncs == 0
    assert len(seen) == 100
    for forward, again in zip(seen[::2], seen[1::2], strict=True):
        for one, other in zip(forward, again, strict=True):
            assert_bit_equal(other, one, "recomputed")


@pytest.mark.parametrize(("backend", "ep_size"), [("loopback", 2), ("all_to_all", 4)])
def test_rows_counts_and_order_are_those_of_the_forward(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(same_rows)


def writing_region(seat: Seat, capacity: cd.RowCapacity) -> None:
    """A region that writes to all that is the caller's of a dispatch, on both runs; and what it has seen before."""
    config = make_config(4, TOP_K, HIDDEN_DIM, expert_alignment=4, row_capacity=capacity, zero_tail=True)
    ids = torch.tensor([[0, 1], [2, 3], [0, 2], [1, -1]])
    with seat.open(config) as dispatcher:
        layer = dispatcher.layer("moe")
        for way in (plain, non_reentrant, reentrant):
            seen: list[tuple[Tensor, ...]] = []

            def region(x: Tensor) -> Tensor:
                x = x.clone()
                routed = layer.dispatch(x, x[:, :TOP_K].sigmoid(), ids)
                theirs = (routed.scores, routed.tokens_per_expert, routed.expert_offsets)
                seen.append(tuple(part.detach().clone() for part in (*theirs, routed.handle.row_scores)))  # noqa: B023
                for part in theirs:
                    part.zero_()
                return layer.combine(routed.rows * routed.rows, routed.handle)

            x = tokens(4, seat.rank)
            way(region, x).sum().backward()
            assert x.grad is not None
            if way is plain:
                wanted, told = x.grad, seen[0]
            assert_bit_equal(x.grad, wanted, "gradient")
            assert len(seen) == (1 if way is plain else 2)
            for scores, counts, offsets, kept in seen:
                for found, expected in zip((scores, counts, offsets, kept), told, strict=True):
                    assert_bit_equal(found, expected, "of a dispatch")
                assert_bit_equal(kept, scores, "scores of a handle")
                assert not kept[int(offsets[-1]) :].any()


@pytest.mark.parametrize("capacity", [cd.RowCapacity.exact(), cd.RowCapacity.worst_case()], ids=["exact", "worst_case"])
@every_backend(1, 2)
def test_what_a_region_writes_to_its_dispatch_is_not_recomputed(
    on: On, backend: str, ep_size: int, capacity: cd.RowCapacity
):
    on(backend, ep_size)(writing_region, capacity)


SHORT = tuple((length, length + 3) for length in (71, 47, 97, 60, 76, 46, 44, 72, 41, 47))
LONG = ((614, 3543), (3543, 1207), (2048, 614))
Lengths = tuple[tuple[int, int], ...]


def dynamic_lengths(seat: Seat, way: Checkpoint, lengths: Lengths) -> list[Tensor]:
    """Train with these lengths, by step and rank: what came out of every step, and the weights in the end."""
    config = make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, num_max_tokens_per_rank=max(map(max, lengths)))
    seen = []
    with seat.open(config) as dispatcher:
        blocks = make_blocks(dispatcher, 2)
        optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)
        for step, length in enumerate(of_rank[seat.rank] for of_rank in lengths):
            h = tokens(length, step, seat.rank)
            for block in blocks:
                h = h + way(block, h)
            loss = h.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # validation between the steps, on another length
                seen += [loss.detach(), way(blocks[0], tokens(5 + step, step)).sum()]
        return [*seen, *(weight.detach() for weight in blocks.parameters())]


@both_kinds
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("loopback", 2), ("all_to_all", 2)])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_lengths_that_change_every_step_train_under_full_recomputation(
    on: On, backend: str, ep_size: int, lengths: Lengths, kind: str
):
    expected, actual = (on(backend, ep_size)(dynamic_lengths, way, lengths) for way in (plain, KINDS[kind]))
    for before, after in zip(expected, actual, strict=True):
        for wanted, tensor in zip(before, after, strict=True):
            assert bool(torch.isfinite(tensor).all())
            assert_bit_equal(tensor, wanted, "loss, validation or weight")


# -- what the router says in the recomputation ------------------------------------------------------------------------


def choices(rank: int) -> tuple[Tensor, Tensor]:
    """Ids A and B: one token of rank 0 changes its mind, and changes the extents of both ranks."""
    generator = torch.Generator().manual_seed(3)
    ids_a = torch.stack([torch.randperm(8, generator=generator)[:TOP_K] for _ in range(16)])
    ids_b = ids_a.clone()
    ids_b[5, 1] = (ids_a[5, 1] + 4) % 8 if (ids_a[5, 1] + 4) % 8 != ids_a[5, 0] else (ids_a[5, 1] + 5) % 8
    return ids_a, ids_a if rank else ids_b


def flipped_router(seat: Seat, way: Checkpoint) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of three layers in two steps: with ids A all the time, and with ids B on every second call."""
    ids_a, ids_b = choices(seat.rank)

    def run(way: Checkpoint, second: Tensor) -> list[Tensor]:
        grads = []
        with seat.open(make_config(8, TOP_K, HIDDEN_DIM, timeout_s=5.0)) as dispatcher:
            for step in range(2):
                x = tokens(16, step, seat.rank)
                h = x
                for number in range(3):
                    answers = iter((ids_a, second, second))
                    h = h + way(squaring(dispatcher.layer(f"{number}"), partial(next, answers)), h)
                h.sum().backward()
                assert x.grad is not None
                grads.append(x.grad)
        return grads

    return run(plain, ids_a), run(way, ids_b)


@both_kinds
@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_what_the_router_chose_in_the_forward_stands(on: On, backend: str, kind: str):
    for expected, actual in on(backend, 2)(flipped_router, KINDS[kind]):
        for wanted, grad in zip(expected, actual, strict=True):
            assert_bit_equal(grad, wanted, "gradient of x")


def flipped_without_replay(seat: Seat) -> str:
    try:
        flipped_router(seat, without_replay)
    except (CheckpointError, cd.PeerTimeout, cd.ContractViolation) as error:
        return type(error).__name__
    return "no error"


def test_without_replay_another_choice_is_an_error_and_no_hang(on: On):
    names = on("all_to_all", 2)(flipped_without_replay, timeout_s=40.0)
    assert "CheckpointError" in names
    assert "no error" not in names


def layer_by_layer(seat: Seat) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients as torch's reentrant kind finds them, and those of ids B at what ids A had brought to each layer."""
    ids_a, ids_b = choices(seat.rank)
    wanted = []
    with seat.open(make_config(8, TOP_K, HIDDEN_DIM, timeout_s=5.0)) as dispatcher:
        for step in range(2):
            inputs = [tokens(16, step, seat.rank)]
            for number in range(3):
                layer = dispatcher.layer(f"{number}")
                inputs.append((inputs[-1] + squaring(layer, lambda: ids_a)(inputs[-1])).detach().requires_grad_())
            grad = torch.ones_like(inputs[-1])
            for number, h in reversed(list(enumerate(inputs[:-1]))):
                out = h + squaring(dispatcher.layer(f"{number}"), lambda: ids_b)(h)
                (grad,) = torch.autograd.grad(out, h, grad)
            wanted.append(grad)
    with_a, found = flipped_router(seat, reentrant_without_replay)
    changed = [not torch.equal(a, b) for a, b in zip(with_a, wanted, strict=True)]
    assert all(changed) or seat.rank, "the last choice shows in no gradient"
    return wanted, found


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_without_replay_the_reentrant_kind_takes_the_last_choice_and_hangs_nobody(on: On, backend: str):
    """It compares nothing of a recomputation with the forward: there is nobody who could raise an error."""
    for expected, actual in on(backend, 2)(layer_by_layer):
        for wanted, grad in zip(expected, actual, strict=True):
            assert_bit_equal(grad, wanted, "gradient of x")


def checked_ids(seat: Seat) -> str:
    answers = iter([[[0, 2], [1, 3]], [[0, 2], [1, 2]]] if seat.rank == 0 else [[[0, 2], [1, 3]]] * 2)
    with seat.open(make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, timeout_s=3.0)) as dispatcher:
        block = squaring(dispatcher.layer("moe"), lambda: torch.tensor(next(answers)))
        out = recompute.checkpoint(block, tokens(2), check_ids=True)
        return refused(out.sum().backward, cd.CrossdockError)


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_ids_are_compared_where_that_is_asked_for(on: On, backend: str):
    message, other = on(backend, 2)(checked_ids)
    told = (
        "the recomputation of layer 'moe' sends token 1 to expert 2 in slot 1, its forward (call 0) to expert 3"
        " (1 slots differ)"
    )
    assert message == told
    assert "redispatch of layer 'moe'" in other or told in other
    assert "ranks [0]" in other or told in other


def autocast_and_a_cold_rank(seat: Seat, way: Checkpoint) -> list[torch.dtype]:
    config = make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    with seat.open(config) as dispatcher:
        layer = dispatcher.layer("moe")

        def block(x: Tensor) -> Tensor:
            scores = x[:, :TOP_K].float().sigmoid()
            routed = layer.dispatch(x, scores, torch.tensor([[0, 1]] * x.shape[0]))  # all of it for rank 0
            seen.extend(part.dtype for part in (routed.rows, routed.scores, routed.tokens_per_expert))
            return layer.combine((routed.rows @ torch.eye(HIDDEN_DIM)).to(torch.bfloat16), routed.handle)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = way(block, tokens(4).to(torch.bfloat16).detach().requires_grad_())
        out.float().sum().backward()
    return seen


@both_kinds
def test_a_cold_rank_keeps_its_dtypes_under_autocast(on: On, kind: str):
    for seen in on("all_to_all", 2)(autocast_and_a_cold_rank, KINDS[kind]):
        assert seen == [torch.bfloat16, torch.float32, torch.int64] * 2


# -- row capacities ----------------------------------------------------------------------------------------------------


def capacity_run(seat: Seat, capacity: cd.RowCapacity, way: Checkpoint) -> tuple[list[Tensor], list[int], list[int]]:
    config = make_config(4, TOP_K, 32, row_capacity=capacity, on_overflow="drop", num_max_tokens_per_rank=16)
    grads, extents, syncs = [], [], []
    with seat.open(config) as dispatcher:
        layer = dispatcher.layer("moe")
        for step in range(3):
            generator = torch.Generator().manual_seed(step + 10 * seat.rank)
            x = torch.randn(16, 32, generator=generator, requires_grad=True)
            ids = torch.randint(0, 4, (16, TOP_K), generator=generator)

            def block(x: Tensor, ids: Tensor = ids) -> Tensor:
                routed = layer.dispatch(x, x[:, :TOP_K].sigmoid(), ids)
                extents.append(routed.rows.shape[0])
                tail = ~routed.row_valid.unsqueeze(1)
                rows = (routed.rows * routed.rows).masked_fill(tail, float("nan"))
                return layer.combine(rows, routed.handle)

            out = way(block, x)
            syncs.append(count(dispatcher, out.sum().backward).host_syncs)
            assert x.grad is not None
            grads.append(x.grad)
        assert dispatcher.stats().layers["moe"].calls == 3
    return grads, extents, syncs


@both_kinds
@pytest.mark.parametrize(
    "capacity",
    [cd.RowCapacity.calibrated(1.5), cd.RowCapacity.calibrated(1.0), cd.RowCapacity.worst_case()],
    ids=str,
)
@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("loopback", 2), ("all_to_all", 2)])
def test_the_extent_of_a_capacity_is_replayed(on: On, backend: str, ep_size: int, capacity: cd.RowCapacity, kind: str):
    plainly = on(backend, ep_size)(capacity_run, capacity, plain)
    replayed = on(backend, ep_size)(capacity_run, capacity, KINDS[kind])
    for (expected, extents, _), (actual, twice, syncs) in zip(plainly, replayed, strict=True):
        assert twice == [extent for extent in extents for _ in range(2)]
        assert syncs == [0, 0, 0]
        for wanted, grad in zip(expected, actual, strict=True):
            assert_bit_equal(grad, wanted, "gradient of x")


# -- what is counted ---------------------------------------------------------------------------------------------------


def calls_of(seat: Seat, way: Checkpoint) -> tuple[Counted, Counted]:
    """Of one region with two layers: its forward and its backward."""
    with seat.open(CONFIG) as dispatcher:
        first, second = make_blocks(dispatcher, 2)
        out: list[Tensor] = []
        forward = count(dispatcher, lambda: out.append(way(lambda x: second(first(x)), tokens(5, seat.rank))))
        return forward, count(dispatcher, out[0].sum().backward)


def saving_dispatch(block: Block, x: Tensor) -> Tensor:
    out: Tensor = recompute.checkpoint(block, x, context_fn=saving(DISPATCH))
    return out


def saving_both(block: Block, x: Tensor) -> Tensor:
    out: Tensor = recompute.checkpoint(block, x, context_fn=saving(DISPATCH, COMBINE))
    return out


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        (plain, 4),  # the backward of two dispatches and two combines
        (non_reentrant, 8),  # all four run again
        (to_the_end, 8),
        (reentrant, 8),
        (saving_dispatch, 6),  # combine runs again, dispatch does not
        (saving_both, 4),
    ],
)
def test_how_many_calls_a_recomputation_makes(on: On, way: Checkpoint, calls: int):
    for forward, backward in on("all_to_all", 2)(calls_of, way):
        assert (forward.calls, forward.host_syncs) == (4, 2)
        assert backward == Counted(calls=calls)


def test_counters_advance_once_per_forward():
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        (block,) = make_blocks(dispatcher, 1)
        for step in range(1, 4):
            non_reentrant(block, tokens(8, step)).sum().backward()
            stats = dispatcher.stats()
            assert (stats.tokens, stats.rows, stats.host_syncs) == (8 * step, 16 * step, step)
            assert stats.calls == 6 * step  # dispatch and combine, both again, and the backward of both


# -- pairing -----------------------------------------------------------------------------------------------------------


def pairing(seat: Seat, case: str) -> None:
    with seat.open(CONFIG) as dispatcher:
        first, second = make_blocks(dispatcher, 2)
        x = tokens(6, seat.rank)

        def both(way: Checkpoint) -> Block:
            return lambda x: way(second, way(first, x))

        def looped(x: Tensor) -> Tensor:
            return first(first(second(first(x))))  # type: ignore[no-any-return]

        regions: dict[str, tuple[Block, Block]] = {
            "one region for two layers": (both(plain), partial(non_reentrant, both(plain))),
            "a layer three times": (looped, partial(non_reentrant, looped)),
            "a layer three times, reentrant": (looped, partial(reentrant, looped)),
            "every second dispatch saved": (looped, partial(recompute.checkpoint, looped, context_fn=every_second)),
        }
        for outer_name, outer in KINDS.items():
            for inner_name, inner in KINDS.items():
                regions[f"{inner_name} in {outer_name}"] = (both(plain), partial(outer, both(inner)))
        expected, actual = (gradient_of(region, x) for region in regions[case])
        assert_bit_equal(actual, expected, f"gradient, {case}")
        syncs = count(dispatcher, lambda: gradient_of(regions[case][1], x)).host_syncs
        assert syncs == (4 if regions[case][0] is looped else 2)  # those of the forward


def every_second() -> Any:
    calls = {False: iter(range(1000)), True: iter(range(1000))}  # older torch asks again in the recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        return operator is DISPATCH and next(calls[context.is_recompute]) % 2 == 1

    return create_selective_checkpoint_contexts(policy)


def gradient_of(region: Block, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    region(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "case",
    [
        "one region for two layers",
        "a layer three times",
        "a layer three times, reentrant",
        "every second dispatch saved",
        *(f"{inner} in {outer}" for outer in KINDS for inner in KINDS),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("all_to_all", 2)])
def test_dispatches_are_paired_by_region_layer_and_order(on: On, backend: str, ep_size: int, case: str):
    on(backend, ep_size)(pairing, case)


def interleaved(seat: Seat, way: Checkpoint) -> None:
    """Dispatch A, dispatch B, combine A, combine B in one region, then a region around each, on one dispatcher."""
    with seat.open(CONFIG) as dispatcher:
        layer, answers = dispatcher.layer("moe"), {"a": [[0, 2], [1, 3]], "b": [[3, 1], [3, 2]]}

        def square(x: Tensor, name: str) -> Tensor:
            return squaring(layer, lambda: torch.tensor(answers[name]))(x)

        def crossed(x: Tensor) -> Tensor:
            scores = x[:, :TOP_K].sigmoid()
            routed = [layer.dispatch(x, scores, torch.tensor(ids)) for ids in answers.values()]
            return sum(layer.combine(r.rows * r.rows, r.handle) for r in routed)  # type: ignore[return-value]

        x = tokens(2, seat.rank)
        expected = gradient_of(lambda x: square(x, "a") + square(x, "b"), x)
        apart = gradient_of(lambda x: way(partial(square, name="a"), x) + way(partial(square, name="b"), x), x)
        assert_bit_equal(apart, expected, "gradient, a region around each")
        assert_bit_equal(gradient_of(partial(way, crossed), x), gradient_of(crossed, x), "gradient, one region")


@both_kinds
def test_two_dispatches_in_flight_keep_to_their_own_layouts(on: On, kind: str):
    on("all_to_all", 2)(interleaved, KINDS[kind])


@both_kinds
def test_backward_runs_twice(kind: str):
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        (block,) = make_blocks(dispatcher, 1)
        x = tokens(6)
        loss = KINDS[kind](block, x).square().sum()
        loss.backward(retain_graph=True)
        assert x.grad is not None
        once = x.grad.clone()
        loss.backward()
        assert_bit_equal(x.grad, once + once, "gradient of two backwards")


def test_a_gradient_taken_inside_the_region():
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        first, second = make_blocks(dispatcher, 2)

        def region(x: Tensor) -> Tensor:
            h = first(x)
            (slope,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
            return second(h + slope)  # type: ignore[no-any-return]

        assert_bit_equal(
            gradient_of(partial(non_reentrant, region), tokens(6)), gradient_of(region, tokens(6)), "gradient"
        )


def test_every_thread_has_its_own_regions():
    """Stages of a pipeline: forward on one thread, backward on another, while a third dispatches plainly."""
    inside, done = threading.Event(), threading.Event()

    def stage(block: Block) -> tuple[Tensor, Tensor]:
        x = tokens(6)

        def slowly(x: Tensor) -> Tensor:
            out = block(x)
            inside.set()
            assert done.wait(20)
            return out

        return x, non_reentrant(slowly, x).sum()

    def bystander(block: Block) -> None:
        assert inside.wait(20)
        block(tokens(3, 1)).sum().backward()
        done.set()

    with (
        cd.TokenDispatcher(CONFIG) as one,
        cd.TokenDispatcher(CONFIG) as other,
        ThreadPoolExecutor(1) as forward,
        ThreadPoolExecutor(1) as beside,
        ThreadPoolExecutor(1) as backward,
    ):
        staged, watching = (
            forward.submit(stage, make_blocks(one, 1)[0]),
            beside.submit(bystander, make_blocks(other, 1)[0]),
        )
        watching.result()
        x, loss = staged.result()
        recorded = [thing for thing in gc.get_objects() if type(thing) is Recorded]
        assert [found.num_tokens for found in recorded] == [6]  # not the bystander's
        counted = count(one, lambda: backward.submit(loss.backward).result())
        assert counted == Counted(calls=4)
        assert x.grad is not None
        plainly = x.detach().requires_grad_()
        make_blocks(one, 1)[0](plainly).sum().backward()
        assert plainly.grad is not None
        assert_bit_equal(x.grad, plainly.grad, "gradient")


def living() -> int:
    return sum(type(thing) in (Frame, Recorded) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        *((kind, "backward") for kind in KINDS),
        *(("non-reentrant", after) for after in ("no backward", "no grad")),
        *(pytest.param("reentrant", after, marks=pytest.mark.full) for after in ("no backward", "no grad")),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_nothing_is_left_behind(kind: str, after: str):
    gc.collect()
    gc.disable()  # by counting references alone
    try:
        assert living() == 0
        with cd.TokenDispatcher(CONFIG) as dispatcher:
            (block,) = make_blocks(dispatcher, 1)
            with torch.set_grad_enabled(after != "no grad"):
                out = KINDS[kind](block, tokens(6))
            assert living() == (0 if after == "no grad" else 2)
            if after == "backward":
                out.sum().backward()
            del out
            assert living() == 0
    finally:
        gc.enable()


# -- what does not match -----------------------------------------------------------------------------------------------


def mismatch(seat: Seat, case: str, way: Checkpoint) -> str:
    """One rank, or every rank, recomputes something else than its forward; returns the error."""
    config = make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, timeout_s=3.0)
    with seat.open(config) as dispatcher, seat.open(config) as stranger:
        a, b = dispatcher.layer("a"), dispatcher.layer("b")
        ids = lambda num: torch.tensor([[0, 2], [1, 3], [3, 0]][:num])  # noqa: E731

        def once(layer: cd.LayerView, x: Tensor, num: int = 3) -> Tensor:
            return squaring(layer, lambda: ids(num))(x[:num]).sum()

        runs: dict[str, Callable[[Tensor, bool], Tensor]] = {
            "another layer": lambda x, again: once(b if again else a, x),
            "too many": lambda x, again: once(a, x) + (once(a, x) if again else 0),
            "too few": lambda x, again: once(a, x) + (0 if again else once(a, x)),
            "tokens": lambda x, again: once(a, x, 2 if again else 3),
            "dispatcher": lambda x, again: once(stranger.layer("a") if again else a, x),
        }
        called: list[None] = []

        def region(x: Tensor) -> Tensor:
            called.append(None)
            return runs[case](x, len(called) > 1)

        return refused(way(region, tokens(3)).backward, cd.ContractViolation)


MISMATCHES = {
    "another layer": "the recomputation of a checkpointed region dispatches layer 'b' 1 times, its forward dispatched"
    " 'a' 1 times",
    "too many": "the recomputation of a checkpointed region dispatches layer 'a' 2 times, its forward dispatched 'a' 1"
    " times",
    "too few": "the recomputation of a checkpointed region dispatched layer 'a' 1 times, its forward 2 times",
    "tokens": "the recomputation of layer 'a' dispatches 2 tokens, its forward (call 0) dispatched 3",
    "dispatcher": "the recomputation of a checkpointed region dispatches layer 'a' 1 times, its forward dispatched 'a'"
    " of another dispatcher 1 times",
}


@pytest.mark.parametrize(
    ("case", "way"),
    [(case, way) for case in MISMATCHES for way in (to_the_end, reentrant) if (case, way) != ("too many", to_the_end)],
)  # torch itself refuses a non-reentrant region that saves more than its forward
def test_another_recomputation_than_the_forward_is_named(on: On, case: str, way: Checkpoint):
    assert on("all_to_all", 2)(mismatch, case, way) == [MISMATCHES[case]] * 2


def another_order(seat: Seat) -> str:
    with seat.open(CONFIG) as dispatcher:
        block = make_blocks(dispatcher, 1)[0]
        losses = [non_reentrant(block, tokens(4, step)).sum() for step in range(2)]
        return refused(losses[seat.rank].backward, cd.ContractViolation)


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_ranks_that_recompute_different_micro_batches(on: On, backend: str):
    for message in on(backend, 2)(another_order):
        assert "(redispatch of layer 'blocks.0')" in message
        assert "the dispatch whose handle is used is call 0 on ranks [0], call 2 on ranks [1]" in message


def test_arguments_that_cannot_work():
    pair: Any = create_selective_checkpoint_contexts([DISPATCH])
    with pytest.raises(cd.ConfigError, match="inner must be a function that returns two contexts, got "):
        recompute.context_fn(pair)
    with pytest.raises(cd.ConfigError, match="the reentrant kind has no contexts"):
        recompute.checkpoint(plain, tokens(1), use_reentrant=True, context_fn=saving(DISPATCH))


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled_region(seat: Seat, way: Checkpoint) -> None:
    torch._dynamo.reset()
    with seat.open(CONFIG) as dispatcher:
        (block,) = make_blocks(dispatcher, 1)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        x = tokens(6, seat.rank)
        expected = gradient_of(block, x)
        assert_bit_equal(gradient_of(compiled, x), expected, "gradient, compiled")
        counted = count(
            dispatcher, lambda: assert_bit_equal(gradient_of(partial(way, compiled), x), expected, "gradient")
        )
        assert (counted.calls, counted.host_syncs) == (6, 1)


@both_kinds
@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("all_to_all", 2)])
def test_a_compiled_block_is_checkpointed_with_replay(on: On, backend: str, ep_size: int, kind: str):
    on(backend, ep_size)(compiled_region, KINDS[kind], timeout_s=100.0)


@pytest.mark.parametrize("way", [without_replay, non_reentrant])
def test_a_region_inside_a_full_graph_is_refused_by_torch(way: Checkpoint):
    torch._dynamo.reset()
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        (block,) = make_blocks(dispatcher, 1)
        whole = torch.compile(partial(way, block), fullgraph=True, backend="inductor")
        with pytest.raises((AssertionError, torch._dynamo.exc.BackendCompilerFailed)):
            whole(tokens(6)).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at it while it traces
def test_a_region_in_code_compiled_with_graph_breaks_is_left_to_eager():
    torch._dynamo.reset()
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        (block,) = make_blocks(dispatcher, 1)
        partly = torch.compile(lambda x: non_reentrant(block, x * 2), backend="aot_eager")
        expected = gradient_of(lambda x: block(x * 2), tokens(6))
        assert_bit_equal(gradient_of(partly, tokens(6)), expected, "gradient")
        assert count(dispatcher, lambda: gradient_of(partly, tokens(6))).host_syncs == 1
