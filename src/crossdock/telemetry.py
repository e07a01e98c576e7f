"""A dispatcher's statistics for TensorBoard and for Prometheus.

Both take what `TokenDispatcher.stats()` returned, in the thread that trains: nothing here calls a dispatcher. Neither
library is imported before it is needed; TensorBoard's is the caller's, through its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from .errors import ConfigError
from .types import DispatcherStats, LayerStats

_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class ScalarWriter(Protocol):
    """What is used of a TensorBoard `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class Figure(NamedTuple):
    """One number of the statistics.

    Attributes:
        name: in words joined by underscores, with its unit; `_total` at the end where it only ever grows.
        value: the number.
        what: a sentence.
        labels: of which layer and local expert.
    """

    name: str
    value: float
    what: str
    labels: Mapping[str, str]

    @property
    def is_counter(self) -> bool:
        """Whether it only ever grows."""
        return self.name.endswith("_total")


def figures(stats: DispatcherStats) -> Iterator[Figure]:
    """Every number of a dispatcher's statistics: its own, every layer's, every local expert's."""
    for field, what in _OF_DISPATCHER.items():
        yield Figure(f"{field}_total", getattr(stats, field), what, {})
    for layer, account in stats.layers.items():
        yield from _of_layer(layer, account)


def write_scalars(writer: ScalarWriter, stats: DispatcherStats, step: int, prefix: str = "crossdock") -> None:
    """Write all numbers but those of single experts to a TensorBoard `SummaryWriter`, or anything with `add_scalar`.

    Tags are `prefix/name` and `prefix/layer/name`.
    """
    for figure in figures(stats):
        if "expert" not in figure.labels:
            place = [figure.labels["layer"]] if figure.labels.get("layer") else []
            writer.add_scalar("/".join([prefix, *place, figure.name.removesuffix("_total")]), figure.value, step)


class PrometheusExporter:
    """The latest statistics in Prometheus's terms.

        exporter = PrometheusExporter({"rank": str(rank)})
        prometheus_client.REGISTRY.register(exporter)  # or exporter.text() into a file for the node exporter
        ...
        exporter.update(dispatcher.stats())            # every now and then, where you train

    Args:
        labels: put on every number as text, to tell ranks and dispatchers apart.

    Raises:
        ConfigError: labels that the numbers have themselves, or that Prometheus does not take.
    """

    def __init__(self, labels: Mapping[str, object] | None = None) -> None:
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        wrong = sorted(name for name in self._labels if not _LABEL.fullmatch(name))
        if wrong:
            raise ConfigError(
                f"labels {wrong} are no names that Prometheus takes: letters, digits and _, no digit first"
            )
        taken = sorted({"layer", "expert"} & set(self._labels))
        if taken:
            raise ConfigError(f"labels {taken} are the exporter's own: name yours otherwise")
        self._figures: list[Figure] = []

    def update(self, stats: DispatcherStats) -> None:
        """Take new numbers in place of the last ones."""
        self._figures = list(figures(stats))

    def text(self) -> str:
        """Everything in Prometheus's text format (version 0.0.4); needs no library."""
        lines = []
        for name, group in self._by_name().items():
            kind = "counter" if group[0].is_counter else "gauge"
            lines += [f"# HELP {name} {group[0].what}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_braces(self._labels | dict(each.labels))} {each.value:.17g}" for each in group]
        return "".join(f"{line}\n" for line in lines)

    def collect(self) -> Iterator[Any]:
        """What a registry of prometheus-client asks for, which has to be installed."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, group in self._by_name().items():
            family = CounterMetricFamily if group[0].is_counter else GaugeMetricFamily
            names = [*self._labels, *group[0].labels]
            metric = family(name, group[0].what, labels=names)
            for each in group:
                metric.add_metric([*self._labels.values(), *each.labels.values()], each.value)
            yield metric

    def _by_name(self) -> dict[str, list[Figure]]:
        groups: dict[str, list[Figure]] = {}
        for figure in self._figures:
            groups.setdefault(f"crossdock_{figure.name}", []).append(figure)
        return groups


_OF_DISPATCHER = {
    "calls": "Operations finished.",
    "tokens": "Tokens that this rank brought to dispatches.",
    "rows": "Rows that reached this rank's experts.",
    "host_syncs": "Times that an operation waited for a number on the host.",
    "sent_bytes": "Bytes put on the wire to other ranks.",
    "sent_rows_bytes": "Bytes of rows put on the wire to other ranks.",
    "skipped_steps": "Optimizer steps that a guard did not apply.",
}
_OF_LAYER = {
    "calls": "Dispatches of the layer.",
    "tokens": "Tokens that this rank brought to the layer.",
    "rows": "Rows that reached the layer's experts on this rank.",
    "rows_wanted": "Rows that were asked for; those above the rows were dropped.",
    "overflows": "Dispatches of which rows were dropped.",
    "skipped_steps": "Optimizer steps that a guard did not apply for the layer.",
    "received_rows_bytes": "Bytes of rows that reached the layer's experts on this rank, a copy for every expert.",
    "sent_rows_bytes": "Bytes of the layer's rows put on the wire to other ranks.",
}
_HELD_BY_LAYER = {
    "last_rows_bytes": "Bytes of the rows of the layer's last dispatch.",
    "saved_bytes": "Bytes of rows that the layer's last combine in grad mode keeps for its backward.",
}


def _of_layer(layer: str, account: LayerStats) -> Iterator[Figure]:
    labels = {"layer": layer}
    for field, what in _OF_LAYER.items():
        yield Figure(f"layer_{field}_total", getattr(account, field), what, labels)
    for field, what in _HELD_BY_LAYER.items():
        yield Figure(f"layer_{field}", getattr(account, field), what, labels)
    yield Figure("layer_imbalance", account.imbalance, "The largest expert's rows over the mean.", labels)
    yield Figure("layer_largest_demand_rows", account.largest_demand, "Rows that the fullest dispatch wanted.", labels)
    if account.fill is not None and account.headroom is not None:
        yield Figure("layer_capacity_rows", account.capacity, "Rows of the fullest dispatch.", labels)
        yield Figure("layer_fill", account.fill, "The largest demand over its capacity.", labels)
        yield Figure("layer_headroom", account.headroom, "The share of its capacity that was never taken up.", labels)
    for expert, rows in enumerate(account.wanted_by_expert):
        by_expert = labels | {"expert": str(expert)}
        yield Figure("layer_expert_rows_wanted_total", rows, "Rows that were asked for, by local expert.", by_expert)


def _braces(labels: Mapping[str, str]) -> str:
    escaped = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return "{" + ",".join(escaped) + "}" if escaped else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
