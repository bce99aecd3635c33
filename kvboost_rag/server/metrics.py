"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvboost_rag.report import Stats
from kvboost_rag.server.admission import Admission
from kvboost_rag.server.engines import Engines
from kvboost_rag.types import SpanKind

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_REUSED = (SpanKind.EXACT, SpanKind.APPROXIMATE)


class Metrics:
    """Counts what a server does, in a registry of its own.

    Parameters
    ----------
    engines
        Asked for their counters when somebody reads the metrics; sums over all of them are shown.
    admission
        Asked likewise.
    """

    def __init__(self, engines: Engines, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self.ttft = Histogram(
            "kvboost_ttft_seconds", "From a request's arrival to its first token, the queue included",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.answer_tokens = Counter("kvboost_completion_tokens", "Tokens of answers", registry=self._registry)
        self.requests = Counter(
            "kvboost_requests", "Requests, by path and status", ["path", "status"], registry=self._registry
        )
        self.stuck = Counter(
            "kvboost_stuck_streams", "Streams broken off because nobody read them any more", registry=self._registry
        )
        self._registry.register(_Gathered(engines, admission))

    def text(self) -> bytes:
        """Write everything in Prometheus' text format; may wait for a forward."""
        return generate_latest(self._registry)


class _Gathered(Collector):
    def __init__(self, engines: Engines, admission: Admission) -> None:
        self._engines = engines
        self._admission = admission

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = [engine.stats for engine in self._engines.all]
        yield from _tokens(stats)
        yield _kept(stats)
        yield _gauge("kvboost_documents", "Documents that are known", sum(s.documents for s in stats))
        yield _gauge("kvboost_active_requests", "Requests that compute", self._admission.active)
        yield _gauge("kvboost_queue_length", "Requests that wait for a place", self._admission.waiting)
        yield _counter("kvboost_evictions", "Chunks that left memory for others", sum(s.evictions for s in stats))
        shared = sum(s.shared_hits for s in stats)
        yield _counter("kvboost_shared_chunks", "Chunks that were read from the tier that machines share", shared)


def _tokens(stats: list[Stats]) -> Iterator[Metric]:
    tokens = {kind: sum(s.tokens[kind.value] for s in stats) for kind in SpanKind}
    counted = CounterMetricFamily("kvboost_prompt_tokens", "Prompt tokens by the origin of their KV", labels=["kind"])
    for kind, count in tokens.items():
        counted.add_metric([kind.value], count)
    yield counted
    share = sum(tokens[kind] for kind in _REUSED) / max(1, sum(tokens.values()))
    yield _gauge("kvboost_hit_rate", "Share of all prompt tokens whose KV was taken as it was stored", share)


def _kept(stats: list[Stats]) -> Metric:
    kept = GaugeMetricFamily("kvboost_kv_bytes", "Bytes of KV by tier", labels=["tier"])
    kept.add_metric(["memory"], sum(s.store_bytes for s in stats))
    kept.add_metric(["disk"], sum(s.disk_bytes for s in stats))
    kept.add_metric(["earlier_prompts"], sum(s.prefix_bytes for s in stats))
    return kept


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)
