"""What clients talk to: it knows whose a request is and which documents it names, and hands it to a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.handle import DeploymentHandle
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvboost_rag.replicas import answers, document_routes
from kvboost_rag.replicas.catalogue import Catalogue
from kvboost_rag.replicas.figures import together
from kvboost_rag.replicas.handing import Task, ask_all, asked_of
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.requests import CountRunning, FrontRequests
from kvboost_rag.replicas.service import Front, FrontService
from kvboost_rag.server.auth import OPERATOR
from kvboost_rag.server.bodies import LimitBody
from kvboost_rag.server.draining import health_of
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.first_check import CheckKey
from kvboost_rag.server.handlers import HANDLERS

__all__ = ["create_front"]

router = APIRouter()


def create_front(
    handle: DeploymentHandle[Any], options: ReplicaOptions, *, hosts: Sequence[str] = ("*",)
) -> FastAPI:
    """Make the application in front of replicas; it computes nothing and speaks the server's API.

    It holds the documents' texts, so that a replica which has not seen a document is told it with the request.

    Parameters
    ----------
    handle
        From :func:`kvboost_rag.replicas.start_replicas`.
    options
        The replicas' own.
    hosts
        As for :func:`kvboost_rag.server.create_app`.
    """
    app = FastAPI(title="kvboost_rag", docs_url=None, redoc_url=None, openapi_url=None)
    limits = options.limits
    requests = FrontRequests(limits.send_timeout)
    app.state.front = FrontService(handle, options, Catalogue(limits.max_known_documents), requests)
    app.add_middleware(CountRunning, requests=requests)
    app.add_middleware(LimitBody, max_bytes=limits.max_body_bytes, seconds=limits.receive_timeout)
    app.add_middleware(CheckKey, keys=options.keys)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    for routes in (router, answers.router, document_routes.router):
        app.include_router(routes)
    return app


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(front: Front) -> Response:
    """Say whether requests are taken."""
    return health_of(front.requests)


@router.get("/metrics")
async def metrics(request: Request, front: Front) -> Response:
    """Return the figures of the front and of all replicas for Prometheus."""
    keys = front.options.keys
    if keys.namespace(request.headers.get("authorization")) != OPERATOR and keys.digests:
        raise ApiError(
            403, "the metrics tell about all namespaces; send the key of the namespace '*'", "wrong_kind_of_key"
        )
    figures = {"front": front.requests.figures(), **dict(await ask_all(front.handle, "figures"))}
    return Response(together(figures), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
@router.get("/v1/models/{name:path}")
async def models(request: Request, front: Front) -> Response:
    """Let any replica say what is served."""
    return await front.hand_over(request, Task(await asked_of(request)))
