"""One token of each of several sequences in one forward, each sequence over its own KV cache.

The linear layers read their weights once for all rows, which is most of what a decode step costs; attention runs row by
row, over each row's cache where it lies. So nothing is padded and no cache is copied; PagedAttention
(https://arxiv.org/abs/2309.06180) reaches the same with blocks of memory and kernels of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.rows import RowsCache, attention_by_row
from kvboost_rag.model.runner import ModelRunner
from kvboost_rag.model.support import is_close, sample_ids

__all__ = ["Row", "can_share", "forward_rows"]

logger = logging.getLogger("kvboost_rag")

_CHECKED: WeakKeyDictionary[ModelRunner, bool] = WeakKeyDictionary()
_LENGTHS = (23, 8)


@dataclass(frozen=True, eq=False)
class Row:
    """The next token of one sequence.

    Parameters
    ----------
    token_id
        The token.
    position
        Its position, and the slot that is written.
    cache
        Holds the KV of all positions before, batch size 1.
    """

    token_id: int
    position: int
    cache: KVCache


def forward_rows(runner: ModelRunner, rows: Sequence[Row]) -> list[Tensor]:
    """Run the next token of each sequence; one alone, or all of a model that can not share, run one after another.

    Logits differ by rounding from those of a row by itself: about 1e-5 of the largest one in float32.

    Parameters
    ----------
    runner
        Of the model, which attends by ``sdpa``, ``eager`` or an implementation registered with transformers.
    rows
        At least one, each of a sequence and a cache of its own.

    Returns
    -------
    list[Tensor]
        ``[vocabulary]`` float32 for each row.
    """
    if len(rows) > 1 and can_share(runner):
        return list(_together(runner, rows).unbind())
    return [_alone(runner, row) for row in rows]


def can_share(runner: ModelRunner) -> bool:
    """Tell whether rows in one forward get the logits of rows by themselves; measured once, logged if not."""
    with model_lock(runner.model):
        if runner not in _CHECKED:
            why = _check(runner)
            if why:
                name = type(runner.model).__name__
                logger.warning("decode steps of %s run one after another, not in one forward: %s", name, why)
            _CHECKED[runner] = not why
        return _CHECKED[runner]


def _check(runner: ModelRunner) -> str:
    """Compare two rows of different lengths with each by itself; return what is wrong."""
    rows = [_encoded(runner, length) for length in _LENGTHS]
    alone = torch.stack([_alone(runner, row) for row in rows])
    try:
        together = _together(runner, rows)
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError, ValueError) as error:
        return f"its attention does not run over several caches ({error})"
    return "" if is_close(runner, together, alone) else "the logits would not be those of a row by itself"


def _encoded(runner: ModelRunner, length: int) -> Row:
    ids, cache = sample_ids(runner.model)[: length + 1], runner.new_cache(length + 1)
    slots = torch.arange(length, device=runner.device)
    runner.encode(ids[None, :length], slots, slots, cache, length)
    return Row(int(ids[-1]), length, cache)


def _alone(runner: ModelRunner, row: Row) -> Tensor:
    ids = torch.tensor([row.token_id, row.position], device=runner.device)
    return runner.forward(ids[:1], ids[1:], row.cache, row.position + 1)


@torch.inference_mode()
def _together(runner: ModelRunner, rows: Sequence[Row]) -> Tensor:
    """Logits ``[rows, vocabulary]`` in float32."""
    ids = torch.tensor([[row.token_id, row.position] for row in rows], device=runner.device)
    cache = RowsCache([row.cache for row in rows], [row.position for row in rows], runner.architecture.windows)
    with model_lock(runner.model), attention_by_row(runner.model):
        out: Any = runner.call(runner.model, ids[:, :1], ids[:, 1:], cache, logits_to_keep=1)
    return out.logits[:, -1].float()  # type: ignore[no-any-return]
