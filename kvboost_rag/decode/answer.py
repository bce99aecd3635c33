"""What an answer is made of, and the tokens and text of one that is growing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvboost_rag.decode.detokenize import Detokenizer
from kvboost_rag.decode.stopping import StopMatcher

__all__ = ["Answer", "Delta", "Finish"]


@dataclass(frozen=True)
class Delta:
    """One step of an answer.

    Parameters
    ----------
    text
        New text; empty while it is held back.
    token_ids
        New tokens; their text may come in a later delta.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """How an answer ended.

    Parameters
    ----------
    reason
        "stop" after an end-of-sequence token or a stop string, "length" after ``max_tokens``.
    stop
        The stop string that was found, or None.
    token_ids
        All tokens of the answer, those of a stop string included, the end-of-sequence token not.
    text
        The whole answer; the texts of all deltas, joined.
    """

    reason: Literal["stop", "length"]
    stop: str | None
    token_ids: tuple[int, ...]
    text: str


class Answer:
    """Tokens and text of an answer so far.

    Parameters
    ----------
    tokenizer
        The model's.
    stops
        Strings that end the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...]) -> None:
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matcher.hit

    def push(self, token_id: int) -> Delta:
        """Take the next token."""
        self.token_ids.append(token_id)
        text = self._matcher.push(self._detokenizer.push(token_id))
        self._texts.append(text)
        return Delta(text, (token_id,))

    def flush(self) -> str:
        """Give the text that was held back, cut at a stop string."""
        text = self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        self._texts.append(text)
        return text

    def finish(self, ended: bool) -> Finish:
        """Sum up; ``ended`` tells whether the model chose an end-of-sequence token."""
        reason: Literal["stop", "length"] = "stop" if ended or self.stop is not None else "length"
        return Finish(reason, self.stop, tuple(self.token_ids), "".join(self._texts))
