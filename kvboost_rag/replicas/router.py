"""Which replica gets a request, by Ray Serve's interface for routers."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvboost_rag.affinity import choose_replica, rank_replicas

__all__ = ["AffinityRouter"]


class AffinityRouter(RequestRouter):
    """Prefers the replica at which a request's documents are at home, unless that one is too busy.

    See :func:`kvboost_rag.affinity.choose_replica`. A request's documents are its argument ``sizes``.
    """

    # A replica that computes says late how much it has to do; at Ray's own 0.1 s the next one would get its request.
    queue_len_response_deadline_s = 1.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Order the replicas, each a group of its own: one that takes no more requests is passed over."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if pending_request is None or not pending_request.kwargs["sizes"] or not candidate_replicas:
            # Of one group Ray takes the replica that has least to do.
            return [candidate_replicas]
        sizes = pending_request.kwargs["sizes"]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        first = choose_replica(sizes, {name: self._load(replica) for name, replica in named.items()})
        rest = [name for name in rank_replicas(sizes, list(named)) if name != first]
        return [[named[name]] for name in (first, *rest)]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
