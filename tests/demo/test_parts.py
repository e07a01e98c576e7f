"""The demo's smaller parts: text, sharded sequences, checkpoint, pictures' curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from crossdock import TokenDispatcher
from crossdock.cli.demo import checkpoint
from crossdock.cli.demo.data import load_text
from crossdock.cli.demo.model import Transformer
from crossdock.cli.demo.parallel import SequenceSharding, gathered_texts
from crossdock.cli.demo.pictures import smoothed
from crossdock.cli.demo.progress import imbalance, load_bars
from crossdock.cli.demo.settings import ModelSizes
from crossdock.cli.demo.train import learning_rate_factor
from crossdock.errors import InvalidInput
from crossdock.testing import assert_bit_equal
from tests.conftest import Ranks

SMALL = ModelSizes(hidden_dim=32, ffn_dim=16, num_experts=8, seq_len=64)


def test_the_standard_library_is_text_enough():
    text = load_text(None)
    assert len(text.train) > 1_000_000
    assert 0.04 < len(text.held_out) / (len(text.train) + len(text.held_out)) < 0.06
    batch = text.batch(3, 64, torch.Generator().manual_seed(0))
    assert batch.shape == (3, 65)
    assert batch.dtype == torch.int64


def test_a_folder_gives_its_text_files_only(tmp_path: Path):
    (tmp_path / "a.txt").write_text("crossdock " * 4000)
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe" * 40_000)
    (tmp_path / ".hidden").write_text("secret " * 40_000)
    text = load_text(tmp_path)
    assert len(text.train) + len(text.held_out) == 40_000
    with pytest.raises(InvalidInput, match=r"holds 0 bytes of UTF-8 text"):
        load_text(tmp_path / "b.bin")


def test_load_bars_and_imbalance():
    assert load_bars([0, 4, 8, 4]) == "▁▅█▅"
    assert imbalance([0, 4, 8, 4]) == 2.0
    assert load_bars([0, 0]) == "▁▁"
    assert imbalance([0, 0]) == 1.0


def test_smoothing_keeps_ends_and_means():
    values = [float(value) for value in range(200)]
    assert smoothed(values) == pytest.approx(values)
    assert smoothed([3.0]) == [3.0]


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_learning_rate_rises_then_falls(steps: int):
    factor = learning_rate_factor(steps)
    rates = [factor(step) for step in range(steps)]
    assert max(rates) == pytest.approx(1.0)
    assert min(rates) > 0


def shared_sequence(rank: int, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = torch.distributed.group.WORLD
    sharding = SequenceSharding(x.shape[1], rank, weights.shape[0], group)
    mine = x[:, sharding.shard].clone().requires_grad_()
    whole = sharding.whole(mine)
    out = sharding.shard_of_sum(whole * weights[rank])
    (out * x[:, sharding.shard]).sum().backward()
    assert mine.grad is not None
    return whole.detach(), out.detach(), mine.grad


@pytest.mark.parametrize("length", [7, 8])
def test_a_sharded_sequence_is_gathered_and_summed(ranks: Ranks, length: int):
    x, weights = torch.randint(9, (2, length, 3)).float(), torch.tensor([2.0, 3.0])
    results = ranks(2).run(shared_sequence, x, weights)
    for whole, _, _ in results:
        assert_bit_equal(whole, x)
    assert_bit_equal(torch.cat([out for _, out, _ in results], 1), 5 * x)
    assert_bit_equal(torch.cat([grad for _, _, grad in results], 1), 5 * x)


def texts(rank: int) -> list[str]:
    return gathered_texts(f"rank {rank} ✓" if rank else "")


def test_texts_are_gathered(ranks: Ranks):
    assert ranks(2).run(texts) == [["", "rank 1 ✓"]] * 2


def test_a_checkpoint_comes_back(tmp_path: Path):
    with TokenDispatcher(SMALL.dispatcher_config(2, "exact")) as dispatcher:
        saved, other = (Transformer(SMALL, dispatcher, seed, torch.device("cpu")) for seed in (1, 2))
    checkpoint.save(tmp_path / "model.safetensors", saved.state_dict(), SMALL)
    state, sizes = checkpoint.load(tmp_path / "model.safetensors")
    assert sizes == SMALL
    checkpoint.load_into(other, state)
    for name, tensor in saved.state_dict().items():
        assert_bit_equal(other.state_dict()[name], tensor, name)
