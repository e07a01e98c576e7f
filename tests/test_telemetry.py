"""Statistics as TensorBoard and Prometheus get them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import crossdock as cd
from crossdock.telemetry import PrometheusExporter, figures, write_scalars


@pytest.fixture(scope="module")
def stats() -> cd.DispatcherStats:
    """Of a dispatcher whose second layer, with a name that has to be escaped, has dropped 2 of 6 rows."""
    config = cd.DispatcherConfig(
        num_experts=2,
        top_k=2,
        hidden_dim=4,
        dtype=torch.float32,
        num_max_tokens_per_rank=4,
        row_capacity=cd.RowCapacity.rows(4),
        on_overflow="drop",
    )
    with cd.TokenDispatcher(config) as dispatcher:
        for layer, num_tokens in (("first", 2), ('a "second"\\', 3)):
            ids = torch.tensor([[0, 1]] * num_tokens)
            dispatcher.layer(layer).dispatch(torch.ones(num_tokens, 4), torch.ones(num_tokens, 2), ids)
        return dispatcher.stats()


class _Writer:
    """What `torch.utils.tensorboard.SummaryWriter` has, which needs a package of its own."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert tag not in self.written
        self.written[tag] = (scalar_value, global_step)


def test_every_number_of_the_statistics_is_there(stats: cd.DispatcherStats):
    names = {figure.name for figure in figures(stats)}
    plain = {name for name in vars(stats) if name != "layers"}
    assert {f"{name}_total" for name in plain} <= names
    assert sum(figure.name == "layer_expert_rows_wanted_total" for figure in figures(stats)) == 4


def test_scalars_for_tensorboard(stats: cd.DispatcherStats):
    writer = _Writer()
    write_scalars(writer, stats, step=7, prefix="ep0")
    assert writer.written["ep0/tokens"] == (5, 7)
    assert writer.written["ep0/first/layer_fill"] == (1.0, 7)
    assert writer.written['ep0/a "second"\\/layer_overflows'] == (1, 7)
    assert not any("expert_rows" in tag for tag in writer.written)


def test_a_real_summary_writer(stats: cd.DispatcherStats, tmp_path: Path):
    pytest.importorskip("tensorboard", reason="20 MB with what it needs: pip install crossdock[telemetry]")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        write_scalars(writer, stats, step=1)
    assert any(path.stat().st_size for path in tmp_path.iterdir())


def test_text_for_prometheus(stats: cd.DispatcherStats):
    exporter = PrometheusExporter({"rank": "0"})
    assert exporter.text() == ""
    exporter.update(stats)
    lines = exporter.text().splitlines()
    assert "# TYPE crossdock_layer_rows_wanted_total counter" in lines
    assert 'crossdock_layer_rows_wanted_total{rank="0",layer="a \\"second\\"\\\\"} 6' in lines
    assert 'crossdock_layer_fill{rank="0",layer="a \\"second\\"\\\\"} 1.5' in lines
    assert 'crossdock_tokens_total{rank="0"} 5' in lines
    assert all(re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+\{(\w+="(\\.|[^"\\])*",?)+\} [-0-9.e+]+', line) for line in lines)
    exporter.update(stats)
    assert exporter.text().splitlines() == lines


def test_a_registry_of_prometheus_client(stats: cd.DispatcherStats):
    import prometheus_client as client  # not above: without it the other tests can run

    exporter, registry = PrometheusExporter({"rank": "0"}), client.CollectorRegistry()
    exporter.update(stats)
    registry.register(exporter)
    assert registry.get_sample_value("crossdock_tokens_total", {"rank": "0"}) == 5
    wanted = {"rank": "0", "layer": "first", "expert": "1"}
    assert registry.get_sample_value("crossdock_layer_expert_rows_wanted_total", wanted) == 2
    samples = {(each.name, *sorted(each.labels.items())): each.value for m in registry.collect() for each in m.samples}
    ours = {
        (f"crossdock_{each.name}", *sorted({"rank": "0", **each.labels}.items())): each.value for each in figures(stats)
    }
    assert samples == ours


def test_labels_are_text_under_names_that_prometheus_takes(stats: cd.DispatcherStats):
    exporter = PrometheusExporter({"rank": 3})
    exporter.update(stats)
    assert 'rank="3"' in exporter.text()
    with pytest.raises(cd.ConfigError, match=r"labels \['1st', '__x', 'ep-rank'\] are no names that Prometheus takes"):
        PrometheusExporter({"ep-rank": 0, "1st": 1, "__x": 2, "fine_1": 3})


def test_labels_that_are_taken():
    with pytest.raises(cd.ConfigError, match=r"labels \['layer'\] are the exporter's own: name yours otherwise"):
        PrometheusExporter({"layer": "x"})
