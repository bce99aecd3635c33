"""The decode loop: a plain generator, without threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase

from kvboost_rag.decode.answer import Answer, Delta, Finish
from kvboost_rag.decode.choose import TokenChooser, check_shape, make_generator
from kvboost_rag.decode.processors import build_processors, eos_ids
from kvboost_rag.sampling import Sampling, as_stops
from kvboost_rag.types import TokenIds

__all__ = ["decode"]


def decode(
    first_logits: Tensor,
    step: Callable[[int], Tensor],
    *,
    prompt_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    generation_config: GenerationConfig,
    logits_processor: Sequence[LogitsProcessor] = (),
) -> Generator[Delta, None, Finish]:
    """Generate an answer, yielding each token as soon as it is chosen.

    There is one delta a token, yielded before the model runs again, with empty text while the text is held back; then,
    if text is left, one without tokens. An end-of-sequence token yields no delta, unless it is the first token: then an
    empty one, so that the first delta always marks the time to the first token. Closing the generator stops the work;
    exceptions of ``step`` reach the consumer as they are. Arguments are checked here, before the first ``next``.

    Parameters
    ----------
    first_logits
        ``[vocab]``, the model's logits after the prompt, any float dtype.
    step
        Runs the model on one token and returns the next logits ``[vocab]``. Not called for a last token.
    prompt_ids
        ``[tokens]``, at least one.
    tokenizer
        The model's.
    sampling
        What the caller asks; its stop strings count together with the generation config's ``stop_strings``.
    generation_config
        The model's; never changed.
    logits_processor
        The caller's own, see `build_processors`.

    Yields
    ------
    Delta
        With ``max_tokens=0`` none.

    Returns
    -------
    Finish
        The generator's return value.

    Raises
    ------
    ValueError
        If a shape is wrong, or the generation config asks for something that `build_processors` refuses.
    ModelOutputError
        From ``next``, if logits hold NaN or +inf, or nothing but -inf.
    """
    prompt_ids = np.asarray(prompt_ids, dtype=np.int64)
    if prompt_ids.ndim != 1 or not prompt_ids.size:
        raise ValueError(f"prompt_ids has shape {prompt_ids.shape}; pass a 1-D array of at least one token id")
    check_shape(first_logits)
    eos = eos_ids(generation_config, tokenizer)
    processors, do_sample = build_processors(
        sampling,
        generation_config,
        prompt_ids=prompt_ids,
        eos=eos,
        vocab_size=first_logits.shape[0],
        device=first_logits.device,
        logits_processor=logits_processor,
    )
    generator = make_generator(sampling.seed, first_logits.device) if do_sample else None
    chooser = TokenChooser(processors, generator, torch.tensor(prompt_ids, device=first_logits.device))
    stops = as_stops(sampling.stop + as_stops(generation_config.stop_strings))
    ends = frozenset(() if sampling.ignore_eos else eos)
    return _loop(first_logits, step, chooser, Answer(tokenizer, stops), ends, sampling.max_tokens)


def _loop(
    logits: Tensor,
    step: Callable[[int], Tensor],
    choose: TokenChooser,
    answer: Answer,
    ends: frozenset[int],
    max_tokens: int,
) -> Generator[Delta, None, Finish]:
    ended = False
    while len(answer.token_ids) < max_tokens:
        token_id = choose(logits)
        ended = token_id in ends
        if ended:
            if not answer.token_ids:
                yield Delta("", ())
            break
        yield answer.push(token_id)
        if answer.stop is not None:
            break
        if len(answer.token_ids) < max_tokens:
            logits = step(token_id)
    if rest := answer.flush():
        yield Delta(rest, ())
    return answer.finish(ended)
