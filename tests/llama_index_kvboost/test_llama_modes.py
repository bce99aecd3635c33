"""Every response mode answers as without reuse when all is recomputed, and reuses what its text leaves whole."""

from __future__ import annotations

import logging

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_setup import MODES, observe, synthesizer

from kvboost_rag import SpanKind

pytestmark = pytest.mark.real
# The nodes for the first are short, so that full prefill takes no time; those for the second fill a window.
QUESTION = "How old was Manning when he played Super Bowl 50?"
LONG = "When was Warsaw's first stock exchange established?"
# simple_summarize puts the repr of a list into the prompt: the line ends inside the nodes are escaped.
WHOLE = [mode for mode in (*MODES, "whole nodes") if mode != "simple_summarize"]


def ask(index, llm, mode, *, question=QUESTION, top_k=2, window=None, **options):
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=top_k), synthesizer(mode, llm.model_copy(update=options), window)
    )
    with observe() as observed:
        answer = str(engine.query(question))
    return answer, observed


def answers(index, llm, mode, **options):
    return [ask(index, llm, mode, **options, **how)[0] for how in ({"repair": "random:1.0"}, {"reuse": False})]


@pytest.mark.parametrize("mode", WHOLE)
def test_a_mode_that_keeps_nodes_whole_reuses_them(index, llm, mode):
    recomputed, reference = answers(index, llm, mode)
    assert recomputed == reference
    assert len(reference) > 10
    _, observed = ask(index, llm, mode, repair="none")
    assert observed.share(llm) >= 0.95
    assert all(report.tokens(SpanKind.RECOMPUTED) == 0 for report in observed.reports)


def test_simple_summarize_reuses_nothing_and_says_so(index, llm, caplog):
    recomputed, reference = answers(index, llm, "simple_summarize")
    assert recomputed == reference
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        _, observed = ask(index, llm, "simple_summarize", repair="none")
    assert observed.share(llm) == 0
    assert "2 documents stand in the prompt as the repr of a Python list" in caplog.text


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_a_node_cut_by_a_full_prompt_is_reused_up_to_the_cut(index, llm, mode):
    window = {"compact": 1000, "tree_summarize": 500}[mode]
    _, observed = ask(index, llm, mode, question=LONG, top_k=3, window=window, repair="none")
    assert len(observed.reports) > 1
    assert 0.6 < observed.share(llm) < 0.95


def test_whole_nodes_are_never_cut(index, llm):
    _, observed = ask(index, llm, "whole nodes", question=LONG, top_k=3, window=1000, repair="none")
    assert len(observed.reports) > 1
    assert observed.share(llm) >= 0.95
