"""All of it in one command: Ray, the replicas, and the front in this process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import ray
import uvicorn
from ray import serve

from kvboost_rag.errors import ReplicasError
from kvboost_rag.replicas.checking import check_options
from kvboost_rag.replicas.front import create_front
from kvboost_rag.replicas.logs import TellFailures
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.starting import are_running, start_replicas, stop_replicas
from kvboost_rag.server.draining import LAST_SECONDS, DrainingServer
from kvboost_rag.server.lifecycle import allowed_hosts
from kvboost_rag.server.place import Place

__all__ = ["FrontServer", "check_room", "serve_replicas"]


class FrontServer(DrainingServer):
    """Serves the front; no signal ends the process, as uvicorn's second would before the replicas are stopped."""

    def _end(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = True


def serve_replicas(
    options: ReplicaOptions, count: int, place: Place, *, announce: Callable[[str], object], log_level: str,
    ray_address: str | None = None,
) -> None:  # fmt: skip
    """Serve by replicas until a signal comes.

    Parameters
    ----------
    options, count
        As for :func:`start_replicas`.
    place
        Where the front listens, once the replicas are ready: until then a client would wait without an answer.
    announce
        Told the address then.
    log_level
        Of uvicorn.
    ray_address
        Of a Ray cluster, on which only the replicas are stopped at the end; None starts Ray on this machine alone.

    Raises
    ------
    OSError
        If another process listens there by now.
    ImportError, ValueError
        If an option can not be used, Ray on this machine has not the cores or GPUs, or replicas run on the cluster
        already.
    ReplicasError
        If Ray can not be started or reached, or no replica be made.
    KeyboardInterrupt
        If SIGTERM or Ctrl-C comes before the replicas are ready.
    """
    check_options(options, count, is_here=ray_address is None)
    with _ray(ray_address):
        if ray_address is None:
            check_room(options, count)
        elif are_running():
            raise ValueError(f"replicas run at {ray_address} already, with a front of their own; stop that one first")
        try:
            app = create_front(start_replicas(options, count), options, hosts=allowed_hosts(place.host, options.keys))
            config = uvicorn.Config(
                app, http="h11", ws="none", log_level=log_level, log_config=None, server_header=False,
                timeout_graceful_shutdown=LAST_SECONDS,
            )  # fmt: skip
            app.add_middleware(TellFailures)
            place.listen()
            announce(place.url)
            FrontServer(config, app.state.front.requests, options.limits).run(sockets=[place.socket])
        finally:
            stop_replicas()


def check_room(options: ReplicaOptions, count: int) -> None:
    """Refuse what Ray would wait for without end.

    Raises
    ------
    ValueError
        If the cores or GPUs that Ray has are too few.
    """
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, unit, each in (("num_cpus", "CPU", 1.0), ("num_gpus", "GPU", 0.0)):
        needed = count * options.resources.get(name, each)
        if needed > there.get(unit, 0.0):
            raise ValueError(
                f"{count} replicas need {needed:g} {unit}s together, and Ray finds {there.get(unit, 0.0):g} on this "
                f"machine; give fewer --replicas or less --replica-{unit.lower()}s"
            )


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(address)
        try:
            yield
        finally:
            if address is None:
                serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
        if _is_main():
            signal.signal(signal.SIGTERM, before)


def _start_ray(address: str | None) -> None:
    # Ray tells its makers about each cluster unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Replicas' stderr comes to ours, and Ray Serve's own lines go to its files instead; a cluster has its own way.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
        else:
            ray.init(address=address, logging_level=logging.WARNING)
    except SystemExit:
        # SIGTERM came, and Ray's own handler took it.
        raise KeyboardInterrupt from None
    except Exception as error:
        raise ReplicasError(_no_ray(address, error)) from error
    if _is_main():
        # Ray's would end the process amid its threads, which aborts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _no_ray(address: str | None, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if address is None:
        return (
            f"Ray does not start on this machine ({reason}); see that cores are idle, that /tmp and /dev/shm have "
            "room, and look into /tmp/ray/session_latest/logs"
        )
    return (
        f"Ray does not answer at {address} ({reason}); give the --ray-address that `ray start --head` printed, and see "
        "that its machines have the same releases of Ray and Python"
    )
