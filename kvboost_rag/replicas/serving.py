"""All of it in one command: Ray, the replicas, and the front in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import ray
import uvicorn
from ray import serve

from kvboost_rag.replicas.front import create_front
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.starting import start_replicas, stop_replicas
from kvboost_rag.server.lifecycle import allowed_hosts, listening_at

__all__ = ["serve_replicas"]


class _Server(uvicorn.Server):
    """Ends at a signal like uvicorn's own, which would then end the process before the replicas are stopped."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running requests end at the first signal, and break them off at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve_replicas(
    options: ReplicaOptions, count: int, host: str, port: int, *, announce: Callable[[str], object], log_level: str,
    ray_address: str | None = None,
) -> None:  # fmt: skip
    """Serve by replicas until a signal comes.

    Parameters
    ----------
    options, count
        As for :func:`start_replicas`.
    host, port
        Where the front listens; port 0 takes a free one.
    announce
        Told the address, once the replicas are ready.
    log_level
        Of uvicorn.
    ray_address
        Of a Ray cluster, on which only the replicas are stopped at the end; None starts Ray on this machine alone.

    Raises
    ------
    OSError
        If the port is in use.
    ValueError
        If the count is below 1.
    """
    with listening_at(host, port) as (listening, address), _ray(ray_address):
        try:
            app = create_front(start_replicas(options, count), options, hosts=allowed_hosts(host, options.keys))
            config = uvicorn.Config(
                app, log_level=log_level, log_config=None, server_header=False,
                timeout_graceful_shutdown=max(1, round(options.limits.drain)),
            )  # fmt: skip
            announce(address)
            _Server(config).run(sockets=[listening])
        finally:
            stop_replicas()


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    # Ray tells its makers about each cluster unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address)
    try:
        yield
    finally:
        if address is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
