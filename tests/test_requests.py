"""What a request may hold beside text: documents inside messages, a begun answer, logits processors, a timeout."""

from __future__ import annotations

import pytest
import torch
from test_engine import DOCUMENTS, GREEDY, MUSIC, RAIN, ZEBRA, make_engine
from transformers import LogitsProcessor

from kvboost_rag import Document, SpanKind


@pytest.fixture(scope="module")
def engine():
    with make_engine(repair="none") as made:
        made.add_documents(DOCUMENTS)
        yield made


def rendered(engine, prompt, **options) -> str:
    return engine.tokenizer.decode(engine.tokenize(prompt, **options))


def test_documents_stand_where_a_message_has_them(engine):
    rain, stranger = DOCUMENTS[2], Document("stranger", "A text of twenty or so letters.")
    content = ["First: ", rain, " Then: ", stranger, " Why?"]
    result = engine.generate([{"role": "user", "content": content}], **GREEDY)
    spans = {s.document_id: s for s in result.report.spans if s.document_id}
    assert spans["rain"].kind is SpanKind.APPROXIMATE
    assert spans["rain"].tokens == len(RAIN)
    assert (spans["stranger"].kind, spans["stranger"].reason) == (SpanKind.COMPUTED, "not indexed")
    as_text = f"First: {RAIN} Then: {stranger.text} Why?"
    assert rendered(engine, [{"role": "user", "content": content}]) == rendered(
        engine, [{"role": "user", "content": as_text}]
    )


def test_a_short_document_inside_a_message_is_reused_although_it_can_not_be_located(engine):
    short = Document("short", "Too short.")
    engine.add_documents([short])
    report = engine.generate([{"role": "user", "content": [short, " Why?"]}], **GREEDY).report
    assert [(s.document_id, s.kind) for s in report.spans if s.document_id] == [("short", SpanKind.APPROXIMATE)]


def test_documents_inside_messages_go_together_with_documents_apart(engine):
    messages = [
        {"role": "system", "content": ["Know: ", DOCUMENTS[0]]},
        {"role": "user", "content": ["And ", DOCUMENTS[1], ". Why?"]},
    ]
    report = engine.generate(messages, documents=["rain"], **GREEDY).report
    assert [s.document_id for s in report.spans if s.document_id] == ["zebra", "rain", "music"]
    text = rendered(engine, messages, documents=["rain"])
    assert [text.find(t) for t in (ZEBRA, RAIN, MUSIC)] == sorted(text.find(t) for t in (ZEBRA, RAIN, MUSIC))


@pytest.mark.parametrize("content", [None, 3, [None], [["nested"]]])
def test_content_that_is_neither_text_nor_document_is_refused(engine, content):
    with pytest.raises(ValueError, match=r"message 0 \(user\) has no text .* a list of str and Document"):
        engine.generate([{"role": "user", "content": content}])


def test_an_answer_goes_on_where_the_last_message_ends(engine):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    text = rendered(engine, messages, template_options={"continue_final_message": True})
    assert text.endswith("<|im_start|>assistant\nBecause")


class Only(LogitsProcessor):
    """Allows one token; notes how many it has seen each time."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        banned = torch.ones_like(scores, dtype=torch.bool)
        banned[:, self.token] = False
        return scores.masked_fill(banned, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logits_processor_decides_what_may_be_said(engine, temperature):
    only = Only(42)
    prompt = "Tell me of the sea."
    result = engine.generate(prompt, max_tokens=3, temperature=temperature, logits_processor=[only])
    assert result.token_ids == (42, 42, 42)
    start = len(engine.tokenize(prompt))
    assert only.lengths == [start, start + 1, start + 2]


def test_a_timeout_ends_an_answer_that_takes_longer(engine):
    stream = engine.stream("Tell me of the sea.", max_tokens=900, temperature=0.0, ignore_eos=True, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"more than timeout=0.05 seconds; pass a larger"):
        list(stream)
    assert engine.generate("Tell me of the sea.", **GREEDY, timeout=600).finish_reason
    with pytest.raises(ValueError, match="timeout=0 leaves no time"):
        engine.stream("Why?", timeout=0)


def test_a_document_is_found_by_its_id(engine):
    assert engine.get_document("zebra").text == ZEBRA
    assert engine.get_document("nobody") is None


def test_the_engine_names_its_repair(engine):
    assert engine.repair == "none"
