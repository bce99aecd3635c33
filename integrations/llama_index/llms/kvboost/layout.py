"""The layout of LlamaIndex's prompts, for the context in which nodes are encoded."""

from __future__ import annotations

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT

from kvboost_rag import Layout

__all__ = ["question_layout"]


def question_layout(template: ChatPromptTemplate = CHAT_TEXT_QA_PROMPT) -> Layout:
    """Make the layout of a question-answering template, so that the first node of its prompts is exact.

    Parameters
    ----------
    template
        At most a system message, then one user message with ``{context_str}`` and, behind it, ``{query_str}``.

    Returns
    -------
    Layout
        For ``KVBoostEngine(layout=...)``.

    Raises
    ------
    ValueError
        If the template has another form.
    """
    *before, last = [(message.role, message.content or "") for message in template.message_templates]
    head, found, tail = last[1].partition("{context_str}")
    if not found or "{query_str}" not in tail or [role for role, _ in before] not in ([], [MessageRole.SYSTEM]):
        raise ValueError(
            "the template is not a system message and a user message with {context_str} before {query_str}; "
            "make a kvboost_rag.Layout by hand"
        )
    system = before[0][1] if before else None
    return Layout(system=system, lead_in=head, question=tail.replace("{query_str}", "{question}"))
