"""The engines of a server: one for each namespace, over one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.engine import KVBoostEngine

__all__ = ["Engines"]


class Engines:
    """Makes and holds the engines.

    All are made at once, so that what is wrong shows at the start and no first request waits for one.

    Parameters
    ----------
    model, tokenizer
        Loaded once for all.
    name
        Of the model, as requests name it.
    namespaces
        See :attr:`kvboost_rag.server.Keys.namespaces`.
    options
        Of :class:`kvboost_rag.KVBoostEngine`. Budgets are those of each namespace; with ``cache_dir`` each has a
        folder of its own in there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        namespaces: Iterable[str] = ("",),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._model, self._tokenizer, self._options = model, tokenizer, dict(options or {})
        self._engines: dict[str, KVBoostEngine] = {}
        try:
            for namespace in namespaces:
                self._engines[namespace] = self._made(namespace)
        except BaseException:
            self.close()
            raise

    def _made(self, namespace: str) -> KVBoostEngine:
        options = dict(self._options)
        if options.get("cache_dir") is not None:
            options["cache_dir"] = Path(options["cache_dir"]) / namespace
        return KVBoostEngine(self._model, self._tokenizer, namespace=namespace, **options)

    def __getitem__(self, namespace: str) -> KVBoostEngine:
        """Return the engine of a namespace."""
        return self._engines[namespace]

    @property
    def all(self) -> tuple[KVBoostEngine, ...]:
        """Every engine."""
        return tuple(self._engines.values())

    def close(self) -> None:
        """Write what is still to be written and release the KV; one engine that fails to keeps no other one open."""
        with ExitStack() as stack:
            for engine in reversed(self.all):
                stack.callback(engine.close)
