"""How far the KV of a prompt is from full prefill's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.types import Span

__all__ = ["Deviation", "relative_distance"]


@dataclass(frozen=True, eq=False)
class Deviation:
    """Keys and values of a prompt compared with those of full prefill, token by token and layer by layer.

    Parameters
    ----------
    keys, values
        ``[layers, tokens]`` float32: the length of the difference over the length of full prefill's own vector, all
        heads together. 0 is equal, 1 is as far off as nothing at all. Keys are compared behind their rotation.
    spans
        Where each token's KV came from.
    """

    keys: Tensor
    values: Tensor
    spans: tuple[Span, ...]

    def mean(self, document_id: str | None = None) -> float:
        """Mean deviation of the values over all layers, of one document or of the whole prompt.

        Raises
        ------
        ValueError
            If the prompt does not hold the document.
        """
        spans = [s for s in self.spans if document_id in (None, s.document_id)]
        if not spans:
            raise ValueError(f"the prompt does not hold document {document_id!r}; see the spans for those it holds")
        return float(torch.cat([self.values[:, s.start : s.end] for s in spans], dim=1).mean())


def relative_distance(own: Tensor, reference: Tensor) -> Tensor:
    """Compare ``[layers, kv_heads, tokens, head_dim]``: ``[layers, tokens]`` float32 on the CPU."""
    difference = (own.float() - reference.float()).square().sum(dim=(1, 3)).sqrt()
    length = reference.float().square().sum(dim=(1, 3)).sqrt().clamp_min(1e-12)
    return (difference / length).cpu()
