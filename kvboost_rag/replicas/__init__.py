"""The server on several replicas, by Ray Serve; needs the extras ``serve`` and ``ray``."""

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "ray")):
    raise ImportError('replicas need the server and Ray Serve: pip install "kvboost-rag[serve,ray]"')

from kvboost_rag.replicas.front import create_front
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.replicas.serving import serve_replicas
from kvboost_rag.replicas.starting import start_replicas, stop_replicas

__all__ = ["ReplicaOptions", "create_front", "serve_replicas", "start_replicas", "stop_replicas"]
