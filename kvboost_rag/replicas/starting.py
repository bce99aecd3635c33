"""Starting replicas, changing their number, and stopping them."""

from __future__ import annotations

import re
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from kvboost_rag.errors import ReplicasError
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.replica import Replica
from kvboost_rag.replicas.router import AffinityRouter

__all__ = ["are_running", "start_replicas", "stop_replicas"]

_APPLICATION = "kvboost"
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt): .")
# Of Ray Serve's own, which would have a line for each request and each change; a replica's are its own matter.
_LOGS = {"log_level": "WARNING", "enable_access_log": False}


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
    ReplicasError
        If a replica can not be made.
    """
    if count < 1:
        raise ValueError(f"there would be {count} replicas; give 1 or more")
    serve.start(proxy_location="Disabled", logging_config=_LOGS)
    try:
        handle = serve.run(_deployment(options, count), name=_APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ReplicasError(f"the replicas can not be started: {_why() or reason_of(str(error))}") from error
    return handle.options(stream=True)


def _why() -> str:
    """Return what Ray knows about the replicas that could not be made."""
    application = serve.status().applications.get(_APPLICATION)
    told = [] if application is None else [d.message for d in application.deployments.values()]
    return next((reason_of(message) for message in told if message), "")


def reason_of(text: str) -> str:
    """Return the last line that names an error, of a stack trace within others; the last line if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "")


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
        logging_config=_LOGS,
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    # Ray gives each deployment a version of its own, and would replace all replicas where only their number changes.
    return made(Replica).options(version=options.version, _internal=True).bind(options)


def are_running() -> bool:
    """Whether replicas have been started on the cluster, by whomever, and not been stopped."""
    return _APPLICATION in serve.status().applications


def stop_replicas() -> None:
    """Stop all replicas, if there are any; Ray itself goes on."""
    # Ray Serve, too, may not have been started yet.
    if are_running():
        serve.delete(_APPLICATION)
