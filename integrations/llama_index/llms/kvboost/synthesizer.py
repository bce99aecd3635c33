"""A response synthesizer that cuts no node in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts.prompt_utils import get_biggest_prompt
from llama_index.core.response_synthesizers.refine import Refine
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.llms.kvboost.base import EngineLLM

__all__ = ["KVBoostSynthesizer", "pack"]


class KVBoostSynthesizer(Refine):
    """Puts as many whole nodes into each prompt as fit, and refines the answer with those that did not.

    As ``response_mode="compact"``, which joins all nodes and cuts the text where a prompt is full: a node cut in the
    middle is reused up to the cut only. Here only a node that fills a prompt alone is ever cut.

    Parameters
    ----------
    llm
        Also makes the prompt helper, unless one is given.
    prompt_helper
        Says how much fits; None takes ``llm.prompt_helper()``.
    **options
        Of LlamaIndex's ``Refine``: templates, ``streaming``, ``output_cls``, ``response_padding_size``.
    """

    def __init__(self, llm: EngineLLM, *, prompt_helper: PromptHelper | None = None, **options: Any) -> None:
        super().__init__(llm=llm, prompt_helper=prompt_helper or llm.prompt_helper(), **options)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from the nodes' texts, one a node."""
        packed = self._packed(query_str, text_chunks)
        return super().get_response(query_str, packed, prev_response, **response_kwargs)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from the nodes' texts, one a node."""
        packed = self._packed(query_str, text_chunks)
        return await super().aget_response(query_str, packed, prev_response, **response_kwargs)

    def _packed(self, query_str: str, texts: Sequence[str]) -> list[str]:
        """Fill prompts by the measure with which Refine will look at them again."""
        templates = [t.partial_format(query_str=query_str) for t in (self._text_qa_template, self._refine_template)]
        splitter = self._prompt_helper.get_text_splitter_given_prompt(
            get_biggest_prompt(templates), padding=self._response_padding_size, llm=self._llm
        )
        return pack(texts, lambda text: len(splitter.split_text(text)) == 1)


def pack(texts: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Join texts, whole and in order, into as few as fit.

    Parameters
    ----------
    texts
        White space around them and empty ones are left out, as LlamaIndex does.
    fits
        Whether a joined text is short enough; a single text stays alone if it is not.

    Returns
    -------
    list[str]
        Texts joined by blank lines.
    """
    packed: list[str] = []
    for text in filter(None, map(str.strip, texts)):
        longer = f"{packed[-1]}\n\n{text}" if packed else text
        if packed and fits(longer):
            packed[-1] = longer
        else:
            packed.append(text)
    return packed
