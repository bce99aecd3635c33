"""A slow reference for assembled prompts: one plain forward with explicit positions and masks, and no cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvboost_rag import KVBoostEngine
from kvboost_rag.plan import BEHIND_HEAD
from kvboost_rag.types import Plan, Span, SpanKind


def reference_logits(engine: KVBoostEngine, plan: Plan, spans: Sequence[Span], shift: int = 0) -> torch.Tensor:
    """Logits of the last prompt token when every approximate span was encoded after the canonical context.

    The sequence holds, for each approximate piece, a copy of the context and the piece, which see only themselves;
    then every other prompt token, which sees all prompt tokens before it, whoever provides them.

    Parameters
    ----------
    plan
        Its repairable spans are the pieces.
    spans
        Of the report: which tokens of the pieces stayed approximate.
    shift
        Moves the pieces by so many places: a mistake the test must notice.
    """
    context = engine._encoder.context
    rows, ids = _Rows(len(context.texts)), plan.token_ids
    provided = {p for s in spans if s.kind is SpanKind.APPROXIMATE for p in range(s.start, s.end)}
    computed = {s.end: s.tokens for s in plan.spans if s.reason == BEHIND_HEAD}
    for piece in plan.repairable:
        block = rows.new_block()
        # The document's first tokens, where they are computed in the prompt, were encoded here as well.
        start = piece.start - computed.get(piece.start, 0)
        head = start - context.length + shift
        rows.add(context.head, np.arange(head, head + len(context.head)), block, visible=False)
        for lane, text in enumerate(context.texts, 1):
            rows.add(text, np.arange(start - len(text), start) + shift, block, visible=False, lane=lane)
        rows.add(ids[start : piece.start], np.arange(start, piece.start) + shift, block, visible=False)
        for position in range(piece.start, piece.end):
            rows.add([ids[position]], [position + shift], block, visible=position in provided)
    for position in sorted(set(range(len(ids))) - provided):
        rows.add([ids[position]], [position], 0, visible=True)
    return rows.run(engine.model)


class _Rows:
    """Tokens of the reference sequence with their positions, blocks and lanes.

    Block 0 is the prompt itself. Within a block, lanes from 1 on are side by side and do not see each other; lane 0
    sees all of them, each as one of so many.
    """

    def __init__(self, lanes: int) -> None:
        self.side_by_side = lanes
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.blocks: list[int] = []
        self.visible: list[bool] = []
        self.lanes: list[int] = []
        self._blocks = 0

    def new_block(self) -> int:
        self._blocks += 1
        return self._blocks

    def add(self, ids, positions, block: int, visible: bool, lane: int = 0) -> None:
        self.ids += [int(i) for i in ids]
        self.positions += [int(p) for p in positions]
        self.blocks += [block] * len(ids)
        self.visible += [visible] * len(ids)
        self.lanes += [lane] * len(ids)

    def run(self, model) -> torch.Tensor:
        positions, blocks = torch.tensor(self.positions), torch.tensor(self.blocks)
        visible, lanes = torch.tensor(self.visible), torch.tensor(self.lanes)
        causal = positions[None, :] <= positions[:, None]
        shares = (lanes[:, None] == 0) | (lanes[None, :] == 0) | (lanes[None, :] == lanes[:, None])
        same = (blocks[None, :] == blocks[:, None]) & shares
        weight = torch.where((lanes[:, None] == 0) & (lanes[None, :] > 0), 1.0 / max(1, self.side_by_side), 1.0)
        # A prompt token sees every provider; a document's token sees its own block alone.
        seen = causal & torch.where(blocks[:, None] == 0, visible[None, :] | same, same)
        window = getattr(model.config, "sliding_window", None)
        sliding = seen & (positions[None, :] > positions[:, None] - window) if window else seen
        masks = {"full_attention": _bias(seen, weight), "sliding_attention": _bias(sliding, weight)}
        types = set(getattr(model.config, "layer_types", None) or ())
        mask = masks if len(types) > 1 else masks["sliding_attention" if window else "full_attention"]
        with torch.inference_mode():
            out = model(
                input_ids=torch.tensor(self.ids)[None],
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=False,
            )
        return out.logits[0, -1]


def _bias(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.log().masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
