"""How often each chunk was retrieved, used and served: what eviction and prefetch go by."""

from kvboost_rag.usage.events import Event, Usage
from kvboost_rag.usage.ledger import HALF_LIFE, UsageLedger

__all__ = ["HALF_LIFE", "Event", "Usage", "UsageLedger"]
