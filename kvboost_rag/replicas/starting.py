"""Starting replicas, changing their number, and stopping them."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.replica import Replica
from kvboost_rag.replicas.router import AffinityRouter

__all__ = ["are_running", "start_replicas", "stop_replicas"]

_APPLICATION = "kvboost"


def start_replicas(options: ReplicaOptions, count: int) -> DeploymentHandle[Any]:
    """Start replicas, or change the number of those that run with the same options; returns when all are ready.

    Ray must have been started (``ray.init``): on this machine alone, or on a cluster. A replica that is taken away ends
    its requests first, for as long as ``limits.drain`` says.

    Parameters
    ----------
    options
        What all have in common.
    count
        How many.

    Returns
    -------
    DeploymentHandle
        For :func:`kvboost_rag.replicas.create_front`. It follows each later change.

    Raises
    ------
    ValueError
        If the count is below 1.
    RuntimeError
        If a replica can not be made; Ray's log says why.
    """
    if count < 1:
        raise ValueError(f"there would be {count} replicas; give 1 or more")
    serve.start(proxy_location="Disabled")
    return serve.run(_deployment(options, count), name=_APPLICATION, route_prefix=None).options(stream=True)


def _deployment(options: ReplicaOptions, count: int) -> Any:
    limits = options.limits
    router: Any = AffinityRouter
    made: Any = serve.deployment(
        num_replicas=count,
        # A replica refuses what is beyond, and Ray would let it wait.
        max_ongoing_requests=limits.max_concurrent + limits.max_queue,
        max_queued_requests=max(1, limits.max_queue),
        graceful_shutdown_timeout_s=limits.drain,
        ray_actor_options=dict(options.resources),
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    # Ray gives each deployment a version of its own, and would replace all replicas where only their number changes.
    return made(Replica).options(version=options.version, _internal=True).bind(options)


def are_running() -> bool:
    """Whether replicas have been started on the cluster, by whomever, and not been stopped."""
    return _APPLICATION in serve.status().applications


def stop_replicas() -> None:
    """Stop all replicas; Ray itself goes on."""
    serve.delete(_APPLICATION)
