"""Grouped experts: gradients, bits that do not depend on neighbours, empty experts, padding and tails."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from crossdock.errors import ConfigError, InvalidInput
from crossdock.nn import GroupedExperts
from crossdock.nn.grouped import grouped_product, grouped_weight_gradient, silu_by_expert, silu_by_expert_gradient
from crossdock.testing import assert_bit_equal, assert_within_baseline

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Widths of whole cache lines and odd ones: in bfloat16 torch's grouped product and the loop.
WIDTHS = [(64, 48), (64, 96), (20, 12), (17, 5)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_width = pytest.mark.parametrize("widths", WIDTHS, ids=str)
COUNTS = [3, 0, 17, 1, 8, 0, 2, 33]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def run(experts: GroupedExperts, rows: Tensor, offsets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, gradients of the rows, and gradients of the three weights."""
    rows = rows.clone().requires_grad_()
    out = experts(rows, offsets)
    out.backward(grad)
    weights = [experts.gate_proj, experts.up_proj, experts.down_proj]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert rows.grad is not None and len(gradients) == 3
    return out.detach(), rows.grad, gradients


def one_by_one(
    experts: GroupedExperts, rows: Tensor, counts: list[int], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The same five results from a plain loop over single rows in another dtype."""
    rows = rows.detach().to(dtype).requires_grad_()
    weights = [w.detach().to(dtype).requires_grad_() for w in (experts.gate_proj, experts.up_proj, experts.down_proj)]
    gate, up, down = weights
    outputs = []
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in zip(rows, expert_of_row, strict=True):
        outputs.append((nn.functional.silu(row @ gate[expert]) * (row @ up[expert])) @ down[expert])
    out = torch.stack(outputs)
    gradients = torch.autograd.grad(out, [rows, *weights], grad.to(dtype))
    return [out.detach(), *gradients]


@every_dtype
@every_width
def test_forward_and_gradients_against_float64(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    experts = GroupedExperts(len(COUNTS), *widths, dtype=dtype, seed=1)
    rows, grad = (random(sum(COUNTS), widths[0], dtype=dtype, seed=seed) for seed in (2, 3))
    out, grad_rows, grad_weights = run(experts, rows, offsets_of(COUNTS), grad)
    truth = one_by_one(experts, rows, COUNTS, grad, torch.float64)
    baseline = one_by_one(experts, rows, COUNTS, grad, dtype)
    names = ["out", "rows.grad", "gate_proj.grad", "up_proj.grad", "down_proj.grad"]
    for name, found, true, base in zip(names, [out, grad_rows, *grad_weights], truth, baseline, strict=True):
        assert_within_baseline(found, true, base, what=name)


@every_dtype
@every_width
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_an_expert_does_not_depend_on_its_neighbours(dtype: torch.dtype, widths: tuple[int, int], ep_size: int) -> None:
    """EP 1 with all experts against EP 2, 4, 8 with some each: the same bits for every expert."""
    num_experts, (hidden_dim, ffn_dim) = len(COUNTS), widths
    num_local = num_experts // ep_size
    rows, grad = (random(sum(COUNTS), hidden_dim, dtype=dtype, seed=seed) for seed in (4, 5))
    everything = run(GroupedExperts(num_experts, *widths, dtype=dtype, seed=6), rows, offsets_of(COUNTS), grad)
    start = 0
    for rank in range(ep_size):
        local = slice(rank * num_local, (rank + 1) * num_local)
        end = start + sum(COUNTS[local])
        experts = GroupedExperts(num_local, hidden_dim, ffn_dim, dtype=dtype, seed=6, first_expert_id=local.start)
        # Cloned, as a rank's own rows are: they start where an allocation starts.
        parts = run(experts, rows[start:end].clone(), offsets_of(COUNTS[local]), grad[start:end].clone())
        assert_bit_equal(parts[0], everything[0][start:end], f"out of rank {rank}")
        assert_bit_equal(parts[1], everything[1][start:end], f"rows.grad of rank {rank}")
        for part, whole in zip(parts[2], everything[2], strict=True):
            assert_bit_equal(part, whole[local], f"weight gradient of rank {rank}")
        start = end


def poison_allocator(*shapes: torch.Size | tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave freed blocks full of NaN behind, of the sizes that the next allocations ask for."""
    blocks = [torch.full(tuple(shape), math.nan, dtype=dtype) for shape in shapes for _ in range(4)]
    del blocks


@every_dtype
@every_width
@pytest.mark.parametrize("counts", [[0, 7, 0, 1], [0, 0, 0, 0], [4, 0, 0, 0]], ids=str)
def test_experts_without_rows_get_zero_gradients(
    dtype: torch.dtype, widths: tuple[int, int], counts: list[int]
) -> None:
    experts = GroupedExperts(4, *widths, dtype=dtype, seed=7)
    rows = random(sum(counts), widths[0], dtype=dtype, seed=8)
    run(
        experts,
        random(8, widths[0], dtype=dtype, seed=9),
        offsets_of([2, 2, 2, 2]),
        torch.ones(8, widths[0], dtype=dtype),
    )
    experts.zero_grad(set_to_none=True)
    poison_allocator(experts.gate_proj.shape, experts.down_proj.shape, dtype=dtype)
    out, _, grad_weights = run(experts, rows, offsets_of(counts), torch.ones_like(rows))
    assert out.shape == rows.shape
    for gradient in grad_weights:
        assert gradient.isfinite().all()
        for expert, count in enumerate(counts):
            if count == 0:
                assert_bit_equal(gradient[expert], torch.zeros_like(gradient[expert]))


@every_dtype
@every_width
def test_tails_of_nan_reach_nothing(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    counts, tail = [3, 0, 5, 1], 6
    experts = GroupedExperts(4, *widths, dtype=dtype, seed=10)
    rows, grad = (random(sum(counts) + tail, widths[0], dtype=dtype, seed=seed) for seed in (11, 12))
    kept = sum(counts)
    clean = run(experts, rows[:kept], offsets_of(counts), grad[:kept])
    experts.zero_grad(set_to_none=True)
    rows[kept:], grad[kept:] = math.nan, math.nan
    poisoned = run(experts, rows, offsets_of(counts), grad)
    assert_bit_equal(poisoned[0][:kept], clean[0], "out")
    assert_bit_equal(poisoned[1][:kept], clean[1], "rows.grad")
    for found, expected in zip(poisoned[2], clean[2], strict=True):
        assert_bit_equal(found, expected, "weight gradient")


@every_dtype
def test_a_tail_alone_gives_zero_gradients(dtype: torch.dtype) -> None:
    experts = GroupedExperts(2, 64, 32, dtype=dtype, seed=13)
    rows = torch.full((5, 64), math.nan, dtype=dtype)
    _, _, grad_weights = run(experts, rows, offsets_of([0, 0]), rows)
    for gradient in grad_weights:
        assert_bit_equal(gradient, torch.zeros_like(gradient))


@every_dtype
@every_width
def test_zero_padding_inside_groups_changes_no_value(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    """Groups (5, 0, 33, 1) padded to 32: padding stays zero, weight gradients are those of the unpadded run."""
    counts, alignment = [5, 0, 33, 1], 32
    padded = [-(-count // alignment) * alignment for count in counts]
    experts = GroupedExperts(4, *widths, dtype=dtype, seed=14)
    rows, grad = (random(sum(counts), widths[0], dtype=dtype, seed=seed) for seed in (15, 16))
    starts = [end - count for end, count in zip(offsets_of(padded).tolist(), padded, strict=True)]
    real = torch.tensor([start + i for start, count in zip(starts, counts, strict=True) for i in range(count)])
    rows_padded, grad_padded = rows.new_zeros(sum(padded), widths[0]), rows.new_zeros(sum(padded), widths[0])
    rows_padded[real], grad_padded[real] = rows, grad
    out, grad_rows, grad_weights = run(experts, rows_padded, offsets_of(padded), grad_padded)
    padding = torch.ones(sum(padded), dtype=torch.bool).index_fill(0, real, False)
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    assert torch.equal(grad_rows[padding], torch.zeros_like(grad_rows[padding]))
    truth = one_by_one(experts, rows, counts, grad, torch.float64)
    baseline = one_by_one(experts, rows, counts, grad, dtype)
    for found, true, base in zip([out[real], grad_rows[real], *grad_weights], truth, baseline, strict=True):
        assert_within_baseline(found, true, base)


@every_dtype
def test_scores_inside_are_scores_on_the_output(dtype: torch.dtype) -> None:
    """Down is linear, so a score on the inner row is that score on the output, up to rounding; a NaN tail stays put."""
    counts = [3, 2]
    experts = GroupedExperts(2, 64, 32, dtype=dtype, seed=17)
    rows, grad = (random(7, 64, dtype=dtype, seed=seed) for seed in (18, 19))
    scores = torch.rand(7, generator=torch.Generator().manual_seed(20))
    scores[5:], rows[5:], grad[5:] = math.nan, math.nan, math.nan
    scores.requires_grad_()
    out = experts(rows, offsets_of(counts), scores)
    out.backward(grad)
    plain = experts(rows, offsets_of(counts)).detach()
    unscored = one_by_one(experts, rows[:5], counts, grad[:5], torch.float64)[0]
    assert_within_baseline(
        out[:5],
        unscored * scores.detach()[:5, None].double(),
        (plain[:5].float() * scores.detach()[:5, None]).to(dtype),
        factor=4.0,  # one more rounding, of the inner row
    )
    assert scores.grad is not None
    assert_within_baseline(
        scores.grad[:5],
        (unscored * grad[:5].double()).sum(-1),
        (plain[:5].float() * grad[:5].float()).sum(-1),
        factor=4.0,
    )
    for weight in experts.parameters():
        assert weight.grad is not None and weight.grad.isfinite().all()


@every_width
def test_gradients_to_the_last_digit_in_float64(widths: tuple[int, int]) -> None:
    weights = random(3, *widths, dtype=torch.float64, seed=21).requires_grad_()
    rows = random(6, widths[0], dtype=torch.float64, seed=22).requires_grad_()
    offsets = offsets_of([2, 0, 4])
    assert torch.autograd.gradcheck(
        lambda r, w: silu_by_expert(grouped_product(r, w, offsets), offsets), (rows, weights), fast_mode=True
    )


@every_dtype
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.t().sum(), lambda y: y[::2].sum()])
def test_gradients_that_are_not_contiguous(dtype: torch.dtype, loss: object) -> None:
    assert callable(loss)
    experts = GroupedExperts(2, 64, 32, dtype=dtype, seed=23)
    rows = random(6, 64, dtype=dtype, seed=24).requires_grad_()
    loss(experts(rows, offsets_of([2, 4]))).backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_rows_that_are_not_contiguous() -> None:
    experts = GroupedExperts(2, 64, 32, seed=25)
    rows = random(64, 6, dtype=torch.float32, seed=26).t()
    assert_bit_equal(experts(rows, offsets_of([2, 4])), experts(rows.contiguous(), offsets_of([2, 4])))


@every_dtype
@every_width
def test_compiles_in_one_piece_with_the_same_bits(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    counts = [3, 0, 5, 2]
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        experts = GroupedExperts(4, *widths, dtype=dtype, seed=27)
        rows = random(12, widths[0], dtype=dtype, seed=28).requires_grad_()
        call = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
        out = call(rows, offsets_of(counts))
        out[:10].sum().backward()
        results.append([out[:10], rows.grad[:10], *(weight.grad for weight in experts.parameters())])  # type: ignore[index]
    for eager, traced in zip(*results, strict=True):
        assert_bit_equal(traced, eager)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.14's own
@every_dtype
@every_width
def test_ops_keep_their_schemas_and_fakes(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    rows, grad = random(6, widths[0], dtype=dtype, seed=29), random(6, widths[1], dtype=dtype, seed=30)
    weights, offsets = random(3, *widths, dtype=dtype, seed=31), offsets_of([2, 0, 4])
    for op, arguments in (
        (grouped_product, (rows.requires_grad_(), weights.requires_grad_(), offsets)),
        (silu_by_expert, (rows, offsets)),
        (grouped_weight_gradient, (rows.detach(), grad, offsets)),
        (silu_by_expert_gradient, (rows.detach(), rows.detach(), offsets)),
    ):
        torch.library.opcheck(op, arguments)


def test_autocast_does_not_change_the_dtype() -> None:
    experts = GroupedExperts(2, 20, 12, seed=32)
    rows = random(6, 20, dtype=torch.float32, seed=33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = experts(rows, offsets_of([2, 4]))
    assert_bit_equal(found, experts(rows, offsets_of([2, 4])))


def test_seeded_weights_do_not_depend_on_the_ep_size() -> None:
    everything = GroupedExperts(4, 8, 6, seed=33)
    part = GroupedExperts(2, 8, 6, seed=33, first_expert_id=2)
    next_layer = GroupedExperts(4, 8, 6, seed=34)
    for whole, half, other in zip(everything.parameters(), part.parameters(), next_layer.parameters(), strict=True):
        assert_bit_equal(half, whole[2:])
        assert not any(torch.equal(a, b) for a in whole for b in other)
        assert float(whole.detach().abs().max()) <= whole.shape[1] ** -0.5


def test_weights_are_drawn_again_as_they_were() -> None:
    """Also where a module was made without memory, as sharded models are; and by a class with a way of its own."""

    class Constant(GroupedExperts):
        def reset_parameters(self, *_: object) -> None:
            for weights in self.parameters():
                torch.nn.init.constant_(weights, 0.5)

    wanted = GroupedExperts(2, 8, 6, seed=3, first_expert_id=4)
    made = GroupedExperts(2, 8, 6, device="meta", seed=3, first_expert_id=4).to_empty(device="cpu")
    made.reset_parameters()
    for weights, as_wanted in zip(made.parameters(), wanted.parameters(), strict=True):
        assert_bit_equal(weights, as_wanted)
    assert (made.seed, made.first_expert_id, Constant(2, 8, 6).seed) == (3, 4, None)


def test_counts_are_read_on_the_host_of_a_cpu() -> None:
    assert GroupedExperts(2, 64, 32, dtype=torch.bfloat16).reads_counts_on_host


def test_refusals() -> None:
    for seed in (-1, 1 << 43):
        with pytest.raises(ConfigError, match=rf"seed must lie in 0\.\.8796093022207, got {seed}"):
            GroupedExperts(4, 8, 8, seed=seed)
    GroupedExperts(1, 8, 8, seed=(1 << 43) - 1, first_expert_id=(1 << 20) - 1)
    for wrong in (-3, (1 << 20) - 1, 0.5):  # behind the last, the experts of the next seed begin
        with pytest.raises(ConfigError, match=rf"first_expert_id must lie in 0\.\.1048574, got {wrong}"):
            GroupedExperts(2, 8, 8, seed=3, first_expert_id=wrong)  # type: ignore[arg-type]
    for first in (0, 2):  # on every rank, that of expert 0 too
        with pytest.raises(
            ConfigError, match=rf"first_expert_id \({first}\) .* the experts of a seed, and there is none"
        ):
            GroupedExperts(2, 8, 8, first_expert_id=first)
    with pytest.raises(ConfigError, match="ffn_dim must be a positive integer, got 0"):
        GroupedExperts(2, 8, 0)
    experts = GroupedExperts(2, 8, 6)
    rows, offsets = torch.zeros(4, 8), offsets_of([1, 3])
    with pytest.raises(InvalidInput, match=r"rows must be torch.float32 \[R, 8\] .*, got torch.float32 \[4, 7\]"):
        experts(rows[:, :7], offsets)
    with pytest.raises(InvalidInput, match="got torch.bfloat16"):
        experts(rows.bfloat16(), offsets)
    with pytest.raises(InvalidInput, match=r"expert_offsets must be torch.int32 \[2\], got torch.int64 \[2\]"):
        experts(rows, offsets.long())
    with pytest.raises(InvalidInput, match=r"got torch.int32 \[3\]"):
        experts(rows, offsets_of([1, 1, 2]))
