"""A server that OpenAI's clients can talk to; needs the extra ``serve`` (fastapi, uvicorn, prometheus-client)."""

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
    raise ImportError(
        'the server needs fastapi, uvicorn and prometheus-client: pip install "kvboost-rag[serve]"'
    )

from kvboost_rag.server.app import create_app
from kvboost_rag.server.auth import Keys, check_host
from kvboost_rag.server.draining import DrainingServer
from kvboost_rag.server.engines import Engines
from kvboost_rag.server.lifecycle import make_server, serve
from kvboost_rag.server.limits import Limits
from kvboost_rag.server.place import Place, taken_place
from kvboost_rag.server.service import Service

__all__ = [
    "DrainingServer", "Engines", "Keys", "Limits", "Place", "Service", "check_host", "create_app", "make_server",
    "serve", "taken_place",
]  # fmt: skip
