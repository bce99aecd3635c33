"""Key spaces: what belongs to one state of the model's weights and adapters, apart from what belongs to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvboost_rag.answering import ReusePath
from kvboost_rag.encode import Encoder
from kvboost_rag.errors import ModelChangedError
from kvboost_rag.model import ModelRunner, WeightsState
from kvboost_rag.plan import Planner
from kvboost_rag.prefix import Prefix
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Chunk

__all__ = ["Reuse", "Space", "Spaces"]

_TRIES = 3


@dataclass(frozen=True, eq=False)
class Reuse:
    """The stages that reuse KV, as set up for one state of the model.

    Parameters
    ----------
    runner, encoder, planner, path
        The stages.
    head
        KV of the canonical context, for every prompt; None if that has no tokens.
    """

    runner: ModelRunner
    encoder: Encoder
    planner: Planner
    path: ReusePath
    head: Prefix | None


@dataclass(frozen=True, eq=False)
class Space:
    """One key space.

    Parameters
    ----------
    fingerprint
        Of the model in this state.
    store
        Holds the chunks, those of other spaces too where it is shared.
    reuse
        None where nothing is reused.
    """

    fingerprint: str
    store: ChunkStore
    reuse: Reuse | None = None

    def keyed(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Give all chunks of a document the keys that they have in this space."""
        return self.reuse.encoder.keyed(chunks) if self.reuse else tuple(chunks)


class Spaces:
    """The key spaces that an engine has met, and which of them the model is in.

    Parameters
    ----------
    look
        State of the model now, found out at little cost.
    fingerprint
        Of the model now; reads all weights, so that it is asked once for each state.
    open_space
        Makes the space of a fingerprint.
    """

    def __init__(
        self,
        look: Callable[[], WeightsState | None],
        fingerprint: Callable[[], str],
        open_space: Callable[[str], Space],
    ) -> None:
        self._look = look
        self._fingerprint = fingerprint
        self._open_space = open_space
        self._known: dict[WeightsState | None, Space] = {}
        self._state: WeightsState | None = None
        self._now: Space | None = None

    def current(self) -> Space:
        """Return the space of the model as it is now; a new one for a state that was never met.

        Raises
        ------
        UnsupportedModelError
            If the KV of a new state can not be moved.
        ModelChangedError
            If the model keeps changing meanwhile.
        """
        state = self._look()
        if self._now is None or state != self._state:
            if state not in self._known:
                state = self._meet(state)
            self._state, self._now = state, self._known[state]
        return self._now

    def _meet(self, state: WeightsState | None) -> WeightsState | None:
        for _ in range(_TRIES):
            fingerprint = self._fingerprint()
            same = (space for space in self if space.fingerprint == fingerprint)
            space = next(same, None) or self._open_space(fingerprint)
            # A forward may itself take adapters apart that were merged and then disabled.
            before, state = state, self._look()
            if state == before:
                self._known[state] = space
                return state
        raise ModelChangedError("the model's weights keep changing; let requests wait until that is over")

    def take_gone(self) -> list[Space]:
        """Forget and return the spaces whose weights were changed in place since, so that they do not come back."""
        if self._state is None:
            return []
        before = set(self)
        self._known = {s: space for s, space in self._known.items() if s is None or not s.is_gone(self._state)}
        return list(before - set(self))

    def __iter__(self) -> Iterator[Space]:
        """Iterate over the spaces, each once."""
        return iter(dict.fromkeys(self._known.values()))
