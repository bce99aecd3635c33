"""What eviction methods save, on made-up requests, against the best that could have been done."""

from kvboost_rag.replay.bound import belady
from kvboost_rag.replay.budgets import HitRates, hit_rates
from kvboost_rag.replay.documents import StoredDocument, make_documents
from kvboost_rag.replay.routing import ROUTINGS, Routed, replay_routing
from kvboost_rag.replay.run import METHODS, format_table, replay, run_replay
from kvboost_rag.replay.trace import Request, Trace, TraceOptions, make_trace

__all__ = [
    "METHODS", "ROUTINGS", "HitRates", "Request", "Routed", "StoredDocument", "Trace", "TraceOptions", "belady",
    "format_table", "hit_rates", "make_documents", "make_trace", "replay", "replay_routing", "run_replay",
]  # fmt: skip
