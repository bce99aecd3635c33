"""From logits to tokens to text."""

from kvboost_rag.decode.answer import Delta, Finish
from kvboost_rag.decode.detokenize import Detokenizer
from kvboost_rag.decode.loop import decode
from kvboost_rag.decode.processors import build_processors, eos_ids
from kvboost_rag.decode.stopping import StopMatcher

__all__ = ["Delta", "Detokenizer", "Finish", "StopMatcher", "build_processors", "decode", "eos_ids"]
