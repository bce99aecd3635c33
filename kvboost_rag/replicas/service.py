"""What all requests at the front share, and whose request one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from ray.serve.handle import DeploymentHandle

from kvboost_rag.replicas.catalogue import Catalogue
from kvboost_rag.replicas.handing import Task, hand_over
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.requests import FrontRequests
from kvboost_rag.server.auth import OPERATOR
from kvboost_rag.server.errors import ApiError

__all__ = ["Front", "FrontService", "Namespace"]


@dataclass(frozen=True, eq=False)
class FrontService:
    """The front's parts; made once, used in one event loop.

    Parameters
    ----------
    handle
        Of the replicas.
    options
        The replicas' own.
    catalogue
        The documents of all namespaces.
    requests
        Those that run.
    """

    handle: DeploymentHandle[Any]
    options: ReplicaOptions
    catalogue: Catalogue
    requests: FrontRequests

    async def hand_over(self, request: Request, task: Task) -> Response:
        """Let a replica answer; see :func:`kvboost_rag.replicas.handing.hand_over`."""
        return await hand_over(self.handle, request, task, self.requests)


async def _front(request: Request) -> FrontService:
    front: FrontService = request.app.state.front
    return front


Front = Annotated[FrontService, Depends(_front)]


async def _namespace(request: Request, front: Front) -> str:
    namespace = front.options.keys.namespace(request.headers.get("authorization"))
    if namespace == OPERATOR:
        raise ApiError(403, "this key reads /metrics alone; send the key of a namespace", "wrong_kind_of_key")
    return namespace


Namespace = Annotated[str, Depends(_namespace)]
"""The namespace that the request's key belongs to."""
