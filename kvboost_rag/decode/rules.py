"""Which logits processor each field of a generation config stands for, in the order of ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import LongTensor, Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as lp

__all__ = ["LAST", "PENALTIES", "WARPERS", "Request", "Rule"]


@dataclass(frozen=True, eq=False)
class Request:
    """What processors need to know of an answer.

    Parameters
    ----------
    prompt
        ``[1, tokens]``.
    eos
        ``[ids]``, or None where there are none.
    max_tokens
        Most tokens to generate.
    vocab_size
        Length of the logits.
    """

    prompt: LongTensor
    eos: Tensor | None
    max_tokens: int
    vocab_size: int

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.prompt.shape[1])

    @property
    def device(self) -> str:
        """Where the logits are."""
        return str(self.prompt.device)


class Rule(NamedTuple):
    """One field of the generation config.

    Parameters
    ----------
    field
        Its name.
    off
        Values that, like None, ask for nothing.
    make
        Builds the processor from any other value.
    needs_eos
        Whether it is about the end-of-sequence token, and so empty where there is none.
    """

    field: str
    off: tuple[Any, ...]
    make: Callable[[Any, Request], LogitsProcessor]
    needs_eos: bool = False


PENALTIES = (
    Rule("sequence_bias", (), lambda v, r: lp.SequenceBiasLogitsProcessor(v)),
    Rule("encoder_repetition_penalty", (1,), lambda v, r: _encoder_penalty(v, r)),
    Rule("repetition_penalty", (1,), lambda v, r: lp.RepetitionPenaltyLogitsProcessor(float(v))),
    Rule("no_repeat_ngram_size", (0,), lambda v, r: lp.NoRepeatNGramLogitsProcessor(v)),
    Rule("encoder_no_repeat_ngram_size", (0,), lambda v, r: _encoder_ngrams(v, r)),
    Rule("bad_words_ids", (), lambda v, r: lp.NoBadWordsLogitsProcessor(v, r.eos)),
    Rule("min_length", (0,), lambda v, r: lp.MinLengthLogitsProcessor(v, _eos(r), r.device), True),
    Rule(
        "min_new_tokens",
        (0,),
        lambda v, r: lp.MinNewTokensLengthLogitsProcessor(r.length, v, _eos(r), r.device),
        True,
    ),
    Rule("forced_bos_token_id", (), lambda v, r: lp.ForcedBOSTokenLogitsProcessor(v)),
    Rule(
        "forced_eos_token_id",
        (),
        lambda v, r: lp.ForcedEOSTokenLogitsProcessor(r.length + r.max_tokens, v, r.device),
    ),
    Rule(
        "exponential_decay_length_penalty",
        (),
        lambda v, r: lp.ExponentialDecayLengthPenalty(v, _eos(r), r.length),
        True,
    ),
    Rule("suppress_tokens", (), lambda v, r: lp.SuppressTokensLogitsProcessor(v, r.device)),
    Rule(
        "begin_suppress_tokens",
        (),
        lambda v, r: lp.SuppressTokensAtBeginLogitsProcessor(v, r.length, r.device),
    ),
)
WARPERS = (
    Rule("temperature", (1,), lambda v, r: lp.TemperatureLogitsWarper(float(v))),
    Rule("top_h", (), lambda v, r: lp.TopHLogitsWarper(v)),
    Rule("top_k", (0,), lambda v, r: lp.TopKLogitsWarper(int(v))),
    Rule("top_p", (1,), lambda v, r: lp.TopPLogitsWarper(float(v))),
    Rule("min_p", (0,), lambda v, r: lp.MinPLogitsWarper(float(v))),
    Rule("typical_p", (1,), lambda v, r: lp.TypicalLogitsWarper(v)),
    Rule("epsilon_cutoff", (0, 1), lambda v, r: lp.EpsilonLogitsWarper(v)),
    Rule("eta_cutoff", (0, 1), lambda v, r: lp.EtaLogitsWarper(v, device=r.device)),
)
LAST = (
    Rule("watermarking_config", (), lambda v, r: v.construct_processor(r.vocab_size, r.device)),
    Rule("renormalize_logits", (False,), lambda v, r: lp.LogitNormalization()),
)


def _eos(request: Request) -> Tensor:
    if request.eos is None:
        raise ValueError("there is no end-of-sequence id; set eos_token_id in the generation config")
    return request.eos


def _encoder_penalty(penalty: float, request: Request) -> LogitsProcessor:
    return lp.EncoderRepetitionPenaltyLogitsProcessor(float(penalty), request.prompt)


def _encoder_ngrams(size: int, request: Request) -> LogitsProcessor:
    return lp.EncoderNoRepeatNGramLogitsProcessor(size, request.prompt)
