"""How the layers of a model turn their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvboost_rag.rope import rotate_into, unrotate

__all__ = ["Rotation", "Tables"]

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, ``[kinds, tokens, pairs]`` float32 each."""

_SWITCHING = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of all layers.

    Parameters
    ----------
    rotary
        The model's rotary embedding.
    kinds
        Layer types that the embedding is asked for; one None where it knows no types.
    kind_of
        Per layer, the index of its kind, or None for a layer that does not rotate its keys.
    interleaved
        How dimensions are paired, see :mod:`kvboost_rag.rope`.
    limit
        Sequences longer than this are rotated by other tables (dynamic NTK, LongRoPE); None if none are.
    """

    rotary: nn.Module
    kinds: tuple[str | None, ...]
    kind_of: tuple[int | None, ...]
    interleaved: bool = False
    limit: int | None = None

    @classmethod
    def declared(cls, rotary: nn.Module, config: Any, layers: int) -> Rotation:
        """Read what the configuration says; whether it is true is for the check at load to find out."""
        parameters = getattr(config, "rope_parameters", None) or {}
        types = (getattr(config, "layer_types", None) or [])[:layers]
        by_type = {t: parameters[t] for t in sorted(set(types)) if isinstance(parameters.get(t), Mapping)}
        limit = _limit(config, list(by_type.values()) or [parameters])
        if not by_type:
            return cls(rotary, (None,), (0,) * layers, limit=limit)
        kinds = tuple(by_type)
        return cls(rotary, kinds, tuple(kinds.index(t) if t in by_type else None for t in types), limit=limit)

    @torch.inference_mode()
    def tables(self, start: int, end: int) -> Tables:
        """Cosine and sine of positions ``start .. end - 1``, for every kind."""
        if self.limit is not None and end > self.limit:
            raise ValueError(f"position {end - 1} is beyond {self.limit}, where the rotation changes")
        buffer = next(self.rotary.buffers())
        positions = torch.arange(start, end, device=buffer.device)[None]
        # The tensor only tells the module which dtype to return.
        like = torch.empty(1, device=buffer.device, dtype=torch.float32)
        found = [self.rotary(like, positions, *([] if kind is None else [kind])) for kind in self.kinds]
        return _stacked([cos for cos, _ in found]), _stacked([sin for _, sin in found])

    def rotate_into(self, out: Tensor, keys: Tensor, tables: Tables, layers: slice = slice(None)) -> None:
        """Rotate keys of some layers, ``[layers, kv_heads, tokens, head_dim]``, into ``out`` of the same shape."""
        rotate_into(out, keys, *self._of(layers, tables), self.interleaved)

    def unrotate(self, keys: Tensor, tables: Tables) -> Tensor:
        """Take the rotation off keys of all layers, ``[layers, kv_heads, tokens, head_dim]``."""
        return unrotate(keys, *self._of(slice(None), tables), self.interleaved)

    def _of(self, layers: slice, tables: Tables) -> Tables:
        """Give each layer the tables of its kind."""
        cos, sin = tables
        if set(self.kind_of) == {0}:
            return cos[0], sin[0]
        # A layer without rotation turns by no angle at all.
        cos, sin = torch.cat([cos, torch.ones_like(cos[:1])]), torch.cat([sin, torch.zeros_like(sin[:1])])
        index = [len(self.kinds) if kind is None else kind for kind in self.kind_of[layers]]
        return cos[index][:, None], sin[index][:, None]


def _stacked(tables: list[Tensor]) -> Tensor:
    return torch.stack([_once_a_pair(table[0]) for table in tables])


def _once_a_pair(table: Tensor) -> Tensor:
    """Reduce ``[tokens, rotary_dim]`` in any of the layouts that models use to ``[tokens, pairs]``."""
    half = table.shape[-1] // 2
    if torch.equal(table[:, :half], table[:, half:]):
        return table[:, :half]
    if torch.equal(table[:, ::2], table[:, 1::2]):
        return table[:, ::2]
    return table


def _limit(config: Any, parameters: list[Mapping[str, Any]]) -> int | None:
    """Tokens up to which the tables stay the same."""
    limits = []
    for own in parameters:
        kind = own.get("rope_type", "default")
        if kind in _SWITCHING:
            original = own.get("original_max_position_embeddings") or config.max_position_embeddings
            # After a longer prompt, dynamic NTK goes back to its first tables only below the original length.
            limits.append(original - 1 if kind == "dynamic" else original)
    return min(limits, default=None)
