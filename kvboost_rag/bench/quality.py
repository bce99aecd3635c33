"""How far an answer is from full prefill's, and how right it is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

__all__ = ["answer_text", "chosen_letter", "divergence", "exact_match", "normalised", "token_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def divergence(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """Compare logits with those of full prefill.

    Parameters
    ----------
    reference, logits
        ``[tokens, vocabulary]``, over the same tokens.

    Returns
    -------
    tuple[float, float]
        Mean over the tokens of KL(reference || logits) in nats, and the share of tokens with the same argmax.
    """
    p = torch.log_softmax(reference.double(), dim=-1)
    q = torch.log_softmax(logits.double(), dim=-1)
    # A vocabulary padded with -inf would give 0 * nan.
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    same = reference.argmax(dim=-1) == logits.argmax(dim=-1)
    return max(0.0, float(terms.sum(dim=-1).mean())), float(same.double().mean())


def answer_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]) -> str:
    """Read the answer out of a greedy continuation: up to the first end-of-text token, then its first line."""
    end = next((i for i, token in enumerate(token_ids) if token in eos), len(token_ids))
    text = str(tokenizer.decode(list(token_ids[:end]), skip_special_tokens=True))
    return text.strip().partition("\n")[0].strip()


def normalised(text: str) -> str:
    """Normalise as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the normalised answer is one of the right ones, else 0."""
    return float(normalised(answer) in {normalised(text) for text in right})


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Best F1 of the normalised answer's words against those of each right answer, 0 to 1."""
    return max(_f1(normalised(answer).split(), normalised(text).split()) for text in right)


def _f1(answer: list[str], right: list[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    shared = sum((Counter(answer) & Counter(right)).values())
    return 2 * shared / (len(answer) + len(right))


def chosen_letter(logits: Tensor, tokenizer: PreTrainedTokenizerBase, options: int) -> str:
    """Read the option that a model chooses with the first token of its answer.

    Parameters
    ----------
    logits
        ``[vocabulary]``, before the first token.
    tokenizer
        Of the model.
    options
        How many letters there are, from A on.

    Returns
    -------
    str
        The letter whose token, with or without a space before it, has the highest logit.

    Raises
    ------
    ValueError
        If the tokenizer has no single token for a letter.
    """
    letters = string.ascii_uppercase[:options]
    return max(letters, key=lambda letter: float(logits[_letter_ids(tokenizer, letter)].max()))


def _letter_ids(tokenizer: PreTrainedTokenizerBase, letter: str) -> list[int]:
    forms = [tokenizer(form, add_special_tokens=False).input_ids for form in (letter, f" {letter}")]
    ids = [form[0] for form in forms if len(form) == 1]
    if not ids:
        raise ValueError(f"the tokenizer has no single token for the letter {letter}; leave out samples with choices")
    return ids
