"""The application: routes, errors and limits put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvboost_rag.server import chat, completions, document_routes, models
from kvboost_rag.server.bodies import LimitBody
from kvboost_rag.server.counting import CountRequests
from kvboost_rag.server.draining import health_of
from kvboost_rag.server.first_check import CheckKey
from kvboost_rag.server.handlers import HANDLERS
from kvboost_rag.server.service import Operator, Served, Service

__all__ = ["create_app"]


def create_app(service: Service, *, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Make the ASGI application of a service; it closes the engines when it is shut down.

    Parameters
    ----------
    service
        Engines, keys and limits.
    hosts
        Names in the ``Host`` header that are answered. Without keys, name this machine's own alone: a page in a browser
        can give its own name this machine's address.
    """
    app = FastAPI(title="kvboost_rag", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_closing_engines)
    app.state.service = service
    app.add_middleware(
        LimitBody, max_bytes=service.limits.max_body_bytes, seconds=service.limits.receive_timeout
    )
    app.add_middleware(CheckKey, keys=service.keys)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(CountRequests, requests=service.metrics.requests)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    for module in (chat, completions, document_routes, models):
        app.include_router(module.router)
    app.add_api_route("/health", _health, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", _metrics, methods=["GET"], dependencies=[Operator])
    return app


@asynccontextmanager
async def _closing_engines(app: FastAPI) -> AsyncIterator[None]:
    yield
    service: Service = app.state.service
    await to_thread.run_sync(service.engines.close)


async def _health(service: Served) -> Response:
    """Say whether requests are taken; waits for nothing."""
    return health_of(service.admission)


def _metrics(service: Served) -> Response:
    """Return figures for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
