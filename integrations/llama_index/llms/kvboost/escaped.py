"""Documents that stand in a prompt in Python's escaped form, where they can not be found."""

from __future__ import annotations

import logging
import re

from kvboost_rag import KVBoostEngine

__all__ = ["warn_of_escaped_documents"]

logger = logging.getLogger("kvboost_rag")

_LIST = re.compile(r"""\[["']""")
_ESCAPE = re.compile(r"""\\([nrt"'\\])""")
_MEANING = {"n": "\n", "r": "\r", "t": "\t"}


def warn_of_escaped_documents(engine: KVBoostEngine, text: str) -> None:
    """Log a warning if a text holds the repr of a list of known documents, as ``simple_summarize`` writes it.

    Line ends and quotes inside a document are escaped there, so that its tokens are others and none of its KV fits.

    Parameters
    ----------
    engine
        Knows the documents.
    text
        A prompt.
    """
    if not _LIST.search(text) or not _ESCAPE.search(text):
        return
    plain = _ESCAPE.sub(lambda match: _MEANING.get(match[1], match[1]), text)
    hidden = _whole(engine, plain) - _whole(engine, text)
    if hidden > 0:
        logger.warning(
            "%d documents stand in the prompt as the repr of a Python list, escaped, and are computed anew; "
            "use KVBoostSynthesizer or response_mode='compact' instead of 'simple_summarize', or join their texts",
            hidden,
        )


def _whole(engine: KVBoostEngine, text: str) -> int:
    return sum(located.complete for located in engine.locate(text))
