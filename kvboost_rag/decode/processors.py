"""Builds transformers' own logits processors for one answer, in the order in which ``generate`` applies them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import LongTensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from kvboost_rag.decode.rules import LAST, PENALTIES, WARPERS, Request, Rule
from kvboost_rag.sampling import Sampling
from kvboost_rag.types import TokenIds

__all__ = ["build_processors", "eos_ids"]

logger = logging.getLogger("kvboost_rag")

# What ``generate`` falls back to when neither the caller nor the model says anything.
_DEFAULTS = {"temperature": 1.0, "top_k": 50}
_OVERRIDES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Given without a temperature on a greedy model these would be ignored; the values turn each off.
_NEED_SAMPLING = {"top_p": 1, "top_k": 0, "min_p": 0}
# Features that need several sequences, several forwards a token, or a clock; with the values that turn them off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "token_healing": (False,),
    "max_time": (),
}


def build_processors(
    sampling: Sampling,
    generation_config: GenerationConfig,
    *,
    prompt_ids: TokenIds,
    eos: tuple[int, ...],
    vocab_size: int,
    device: torch.device | str = "cpu",
    logits_processor: Sequence[LogitsProcessor] = (),
) -> tuple[LogitsProcessorList, bool]:
    """Build what turns the model's logits into the scores that a token is chosen from.

    Every processor that ``generate`` builds from a generation config is built here, in the same order, except those in
    *Raises*. Settings that only change speed or the cache (assistants, prompt lookup, compilation) are not looked at,
    nor are ``max_length`` and ``max_new_tokens``; `decode` adds ``stop_strings``. ``remove_invalid_values`` is not
    applied, because it hides a broken model: it is logged, and `ModelOutputError` is raised when the model breaks.

    Parameters
    ----------
    sampling
        What the caller asks; its values win over the generation config's.
    generation_config
        The model's; never changed.
    prompt_ids
        ``[tokens]``; penalties on repetition count them, minimum lengths start after them.
    eos
        End-of-sequence ids, see `eos_ids`.
    vocab_size
        Length of the logits.
    device
        Where the logits are.
    logits_processor
        The caller's own; they stand, as in ``generate``, behind the penalties and before temperature and top-p.

    Returns
    -------
    processors : LogitsProcessorList
        Called as ``processors(ids [1, tokens], scores [1, vocab])``; new for each answer, for some hold state.
    do_sample : bool
        Whether to draw from the scores' softmax; otherwise the largest score wins.

    Raises
    ------
    ValueError
        If the generation config asks for beams, several sequences, guidance, contrastive or DoLa decoding,
        constraints, token healing or a time limit; or if ``top_p``, ``top_k`` or ``min_p`` is given where decoding is
        greedy though no temperature was given. With ``temperature=0`` they are accepted: greedy is their limit.
    """
    _refuse_unsupported(generation_config)
    values = _values(sampling, generation_config)
    do_sample = _samples(sampling, generation_config, values)
    request = Request(
        prompt=cast(LongTensor, torch.tensor(prompt_ids, device=device).unsqueeze(0)),
        eos=torch.tensor(eos, device=device) if eos else None,
        max_tokens=sampling.max_tokens,
        vocab_size=vocab_size,
    )
    rest = (*(WARPERS if do_sample else ()), *LAST)
    made = [*_make(PENALTIES, values, request), *logits_processor, *_make(rest, values, request)]
    return LogitsProcessorList(made), do_sample


def eos_ids(generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Collect the ids that end an answer: the generation config's and the tokenizer's.

    Parameters
    ----------
    generation_config
        ``eos_token_id`` may be an int, a list or None.
    tokenizer
        The model's.

    Returns
    -------
    tuple of int
        Without repetition; empty where neither names any.
    """
    named = generation_config.eos_token_id
    ids = [] if named is None else torch.as_tensor(named).reshape(-1).tolist()
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def _refuse_unsupported(config: GenerationConfig) -> None:
    for name, off in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value not in off:
            raise ValueError(
                f"the model's generation config has {name}={value!r}, which kvboost_rag can not do; set "
                f"model.generation_config.{name} = None, or use transformers' generate for it"
            )
    if getattr(config, "remove_invalid_values", None):
        logger.warning("remove_invalid_values is not applied: logits that are not numbers raise ModelOutputError")


def _values(sampling: Sampling, config: GenerationConfig) -> dict[str, Any]:
    values = {rule.field: getattr(config, rule.field, None) for rule in (*PENALTIES, *WARPERS, *LAST)}
    for name in _OVERRIDES:
        asked = getattr(sampling, name)
        values[name] = values[name] if asked is None else asked
    return values | {name: default for name, default in _DEFAULTS.items() if values[name] is None}


def _samples(sampling: Sampling, config: GenerationConfig, values: dict[str, Any]) -> bool:
    if sampling.temperature is not None:
        return sampling.temperature > 0
    if config.do_sample and values["temperature"] > 0:
        return True
    for name, off in _NEED_SAMPLING.items():
        if getattr(sampling, name) not in (None, off):
            raise ValueError(
                f"{name}={getattr(sampling, name)!r} would be ignored, because this model decodes greedily by default; "
                "set temperature as well (1.0 leaves the probabilities as they are)"
            )
    return False


def _make(rules: tuple[Rule, ...], values: dict[str, Any], request: Request) -> list[LogitsProcessor]:
    made = []
    for rule in rules:
        value = values[rule.field]
        if value is None or value in rule.off or (rule.needs_eos and request.eos is None):
            continue
        made.append(rule.make(value, request))
    return made
