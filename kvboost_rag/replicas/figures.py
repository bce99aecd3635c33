"""Figures of several replicas as one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["together"]


def together(texts: Mapping[str, str]) -> bytes:
    """Put the figures of replicas together, each with a label ``replica`` that names it.

    Parameters
    ----------
    texts
        Name of each replica to its figures in Prometheus' text format.

    Returns
    -------
    bytes
        The same format.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from metrics.values()
