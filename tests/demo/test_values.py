"""A value that cannot work is one clear sentence and exit code 2, where it can be known before any rank starts."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from crossdock.cli.demo import demo
from crossdock.cli.demo.launch import choose_num_ranks
from crossdock.errors import ConfigError
from crossdock.testing import RankResult, RanksFailed

app = typer.Typer()
app.command()(demo)


TEXT = ("--data", str(Path(__file__).parents[1]))  # the default, the standard library, takes half a second to read


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    return sentence.removeprefix("crossdock demo: ")


def test_wrong_values(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("too short")
    out = ("--out", str(tmp_path / "out"))
    assert refused(*out, "--steps", "0") == "--steps must be at least 1, got 0"
    assert refused(*out, "--seed", "-1") == "--seed must lie in 0..4294967295, got -1"
    assert refused(*out, "--seed", "20000000000000000").startswith("--seed must lie in 0..")
    assert refused(*out, "--backend", "local").startswith("--backend must be one of auto, all_to_all")
    assert refused(*out, "--data", str(tmp_path / "nowhere")) == f"--data {tmp_path / 'nowhere'} does not exist"
    assert "holds 9 bytes of UTF-8 text, the demo needs at least 20000" in refused(*out, "--data", str(file))
    assert refused("--out", str(file)) == f"--out {file} is a file, it must be a folder"
    assert "is in a folder that does not exist" in refused(*out, "--json", str(tmp_path / "no" / "report.json"))
    assert not (tmp_path / "out").exists()


def test_packages_that_are_missing_are_told_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crossdock.cli.extras.find_spec", lambda name: None)
    for module in ("crossdock.cli.demo.conduct", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it would fail
    sentence = "matplotlib and safetensors must be installed: pip install matplotlib safetensors"
    assert refused("--steps", "2") == sentence


def test_ranks_must_divide_the_experts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert [choose_num_ranks(asked, 16) for asked in (None, 1, 4)] == [2, 1, 4]
    for asked in (0, 3):
        with pytest.raises(ConfigError, match=f"--ranks {asked} must divide the model's 16 experts: 1, 2, 4, 8, 16"):
            choose_num_ranks(asked, 16)


def test_all_gpus_are_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    assert choose_num_ranks(None, 16) == 4
    with pytest.raises(ConfigError, match="--ranks 8 is more than the 6 GPUs of this machine"):
        choose_num_ranks(8, 16)


def test_torchrun_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert choose_num_ranks(None, 16) == choose_num_ranks(8, 16) == 8
    with pytest.raises(ConfigError, match="--ranks 2 differs from torchrun's 8 ranks: leave --ranks out"):
        choose_num_ranks(2, 16)


def test_a_refusal_of_the_ranks_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> bool:
        answer = RankResult(rank=1, error_type="BackendUnavailable", message="backend 'mine' is not available here")
        raise RanksFailed([RankResult(rank=0), answer])

    monkeypatch.setattr("crossdock.cli.demo.conduct.conduct", refuse)
    assert refused("--out", str(tmp_path), *TEXT) == "backend 'mine' is not available here"


@pytest.mark.parametrize(("outcome", "exit_code"), [(True, 0), (False, 1), (KeyboardInterrupt(), 130)])
def test_exit_codes(outcome: bool | BaseException, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crossdock.cli.demo.conduct.conduct", mock.Mock(side_effect=[outcome]))
    assert CliRunner().invoke(app, ["--out", str(tmp_path), *TEXT]).exit_code == exit_code
