"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.server.service import Caller, Served

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: Served, caller: Caller) -> dict[str, Any]:
    """List the one model."""
    return {"object": "list", "data": [_described(service.engines.name, caller.engine)]}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, service: Served, caller: Caller) -> dict[str, Any]:
    """Describe the model."""
    service.check_model(model)
    return _described(model, caller.engine)


def _described(name: str, engine: KVBoostEngine) -> dict[str, Any]:
    window = getattr(engine.model.config, "max_position_embeddings", None)
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvboost_rag", "max_model_len": window}
