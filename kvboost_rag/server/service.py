"""What all requests of a server share, and whose request one is."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.server.admission import Admission
from kvboost_rag.server.auth import OPERATOR, Keys
from kvboost_rag.server.engines import Engines
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits
from kvboost_rag.server.metrics import Metrics
from kvboost_rag.server.writes import Writes

__all__ = ["Caller", "Operator", "Served", "Service", "Tenant", "check_model", "new_id"]


@dataclass(frozen=True, eq=False)
class Tenant:
    """A namespace, its engine, and what happens to its documents."""

    namespace: str
    engine: KVBoostEngine
    writes: Writes = field(default_factory=Writes)


@dataclass(frozen=True, eq=False)
class Service:
    """A server's parts; made once, used in one event loop.

    Parameters
    ----------
    engines
        Who answers.
    keys
        Who may ask.
    limits
        How much.
    """

    engines: Engines
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    threads: CapacityLimiter = field(init=False)
    tenants: Mapping[str, Tenant] = field(init=False)

    def __post_init__(self) -> None:
        """Make what belongs together; one thread for each place, so that none waits for a thread."""
        object.__setattr__(self, "admission", Admission(self.limits, len(self.keys.namespaces)))
        object.__setattr__(self, "metrics", Metrics(self.engines, self.admission))
        object.__setattr__(self, "threads", CapacityLimiter(self.limits.max_concurrent))
        object.__setattr__(self, "tenants", {name: Tenant(name, self.engines[name]) for name in self.keys.namespaces})

    def check_model(self, name: str) -> None:
        """Refuse any other model than the one that is served."""
        check_model(name, self.engines.name)


def check_model(name: str, served: str) -> None:
    """Refuse any other model than the one that is served."""
    if name != served:
        raise ApiError(404, f"the model {name!r} is not served here; ask for {served!r}", "model_not_found", "model")


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


async def _caller(request: Request, service: Served) -> Tenant:
    namespace = service.keys.namespace(request.headers.get("authorization"))
    if namespace == OPERATOR:
        raise ApiError(403, "this key reads /metrics alone; send the key of a namespace", "wrong_kind_of_key")
    return service.tenants[namespace]


Caller = Annotated[Tenant, Depends(_caller)]
"""The namespace that the request's key belongs to."""


async def _operator(request: Request, service: Served) -> None:
    namespace = service.keys.namespace(request.headers.get("authorization"))
    if service.keys.digests and namespace != OPERATOR:
        raise ApiError(
            403, "the metrics tell about all namespaces; send the key of the namespace '*'", "wrong_kind_of_key"
        )


Operator = Depends(_operator)


def new_id(kind: str) -> str:
    """Make an id for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"
