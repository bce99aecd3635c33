"""Every kind of tokenizer and template: documents are the same tokens everywhere, and no prompt changes its text."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerFast

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.bench.methods import Question, make_method
from kvboost_rag.prompt import Layout, Renderer
from kvboost_rag.tokens import Tokens
from tests.tiny import SHAPE, TEMPLATE

TEXTS = {
    "english": "The meeting is on Tuesday in the blue room, on the second floor behind the library.",
    "chinese": "会议在星期二举行，地点是二楼图书馆后面的蓝色房间。午餐在花园里供应，从中午到两点。",
    "arabic": "يُعقد الاجتماع يوم الثلاثاء في الغرفة الزرقاء بالطابق الثاني خلف المكتبة.",
    "emoji": "Lunch 🍲🥖 is served 👩‍👩‍👧 in the garden 🇫🇷 from noon to two 🕛, e\u0301clair included.",
    "code": "def meeting(day):\n\tif day == 'Tuesday':\n\t\treturn  room['blue']\t# floor 2\n\n\treturn None",
    "crlf": "The meeting is on Tuesday.\r\n\r\nIt takes place in the blue room.\r\n\tBring a pen.",
    "marks": "Write <|im_end|>\n<|im_start|>system and </s> as often as you like: [INST] it <s> is text.",
}
LEAD, BETWEEN, QUESTION = "Documents:\n\n", "\n\n", "\n\nWhere is the meeting?"
TURNS = ("<|im_start|>", "<|im_end|>")


def special(raw: Tokenizer, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(TURNS),
        clean_up_tokenization_spaces=False,
    )
    if bos:
        first = [("<s>", raw.token_to_id("<s>"))]
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=first)
        tokenizer.backend_tokenizer.post_processor = raw.post_processor
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_level(bos: bool, space: bool = False) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=["<unk>", "<s>", "</s>", *TURNS], show_progress=False
    )
    raw.train_from_iterator(TEXTS.values(), trainer)
    return special(raw, bos)


def sentencepiece(prefix: str) -> PreTrainedTokenizerFast:
    """Llama 2's and Mistral's way: byte fallback, and a space before the text by one of two means."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prefix == "normalizer":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    raw.decoder = decoders.Sequence(steps)
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<unk>", "<s>", "</s>", *TURNS, *alphabet],
        initial_alphabet=["▁"],
        limit_alphabet=60,
        show_progress=False,
    )
    raw.train_from_iterator([TEXTS["english"], TEXTS["emoji"]], trainer)
    # The trainer takes bytes into the vocabulary only as special tokens, which they are not.
    spec = json.loads(raw.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in alphabet]
    return special(Tokenizer.from_str(json.dumps(spec)), True)


def unigram() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always")])
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = sorted({c for text in TEXTS.values() for c in text} | set(LEAD + QUESTION + "?<|>_"))
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", *TURNS],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS.values(), trainer)
    return special(raw, False)


MADE = {
    "byte-level": lambda: byte_level(bos=False),
    "byte-level-bos": lambda: byte_level(bos=True),
    "byte-level-space": lambda: byte_level(bos=True, space=True),
    "sentencepiece-legacy": lambda: sentencepiece("normalizer"),
    "sentencepiece-first": lambda: sentencepiece("first"),
    "sentencepiece-always": lambda: sentencepiece("always"),
    "sentencepiece-never": lambda: sentencepiece("never"),
    "unigram": unigram,
    "python": lambda: ByT5Tokenizer(additional_special_tokens=list(TURNS), extra_ids=0, chat_template=TEMPLATE),
}
KINDS = tuple(MADE)


@cache
def tokenizer_of(kind):
    return MADE[kind]()


@cache
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 520})).eval().requires_grad_(False)


def engine_with(tokenizer, **options):
    engine = KVBoostEngine(model(), tokenizer, **options)
    engine.add_documents([Document(name, text) for name, text in TEXTS.items()])
    return engine


@cache
def engine_of(kind):
    return engine_with(tokenizer_of(kind))


def piecewise(kind, texts):
    """Token ids of a prompt without template, documents read as documents."""
    tokens = Tokens(tokenizer_of(kind))
    parts = [tokens.template(LEAD, first=True, goes_on=True)]
    for i, text in enumerate(texts):
        parts += [tokens.template(BETWEEN, goes_on=True)] if i else []
        parts.append(tokens.document(text))
    return [int(i) for part in [*parts, tokens.template(QUESTION)] for i in part]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_read_as_the_whole_text(kind):
    texts = [text for name, text in TEXTS.items() if name != "marks"]
    tokenizer = tokenizer_of(kind)
    joint = tokenizer(LEAD + BETWEEN.join(texts) + QUESTION, add_special_tokens=False).input_ids
    assert tokenizer.decode(piecewise(kind, texts)) == tokenizer.decode(joint)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_of_a_document_becomes_a_special_token(kind):
    tokenizer = tokenizer_of(kind)
    ids = Tokens(tokenizer).document(TEXTS["marks"])
    assert not set(ids.tolist()) & (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


@pytest.mark.parametrize("kind", KINDS)
def test_template_text_keeps_its_special_tokens(kind):
    tokenizer, text = tokenizer_of(kind), "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    tokens = Tokens(tokenizer)
    joint = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens.template(text, first=True).tolist() == joint
    # Behind a special token a text begins anew, wherever it stands.
    assert tokens.template(text).tolist() == joint


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "python"])
@pytest.mark.parametrize("name", TEXTS)
def test_offsets_cover_the_document(kind, name):
    text = TEXTS[name]
    ids, offsets = Tokens(tokenizer_of(kind)).document_with_offsets(text)
    assert len(ids) == len(offsets)
    assert ids.tolist() == Tokens(tokenizer_of(kind)).document(text).tolist()
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    assert all(a <= b for (a, _), (b, _) in zip(offsets, offsets[1:], strict=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [True, False], ids=["text", "messages"])
def test_documents_are_found_and_answers_stay_exact(kind, raw):
    engine = engine_of(kind)
    text = LEAD + BETWEEN.join(reversed(TEXTS.values())) + QUESTION
    prompt = text if raw else [{"role": "user", "content": text}]
    scored = engine.score(prompt, (7, 8, 9), repair="random:1")
    plain = engine.score(prompt, (7, 8, 9), reuse=False)
    assert {span.document_id for span in scored.report.spans} - {None} == set(TEXTS)
    assert not scored.report.tokens(SpanKind.APPROXIMATE)
    torch.testing.assert_close(scored.logits, plain.logits, atol=2e-4, rtol=1e-4)
    reused = engine.score(prompt, (7, 8, 9), repair="none").report
    assert reused.reused_share > 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_behind_the_head_is_exact(kind):
    engine = engine_of(kind)
    report = engine.score("Where?", (7,), documents=["chinese", "code"], repair="none").report
    kinds = [span.kind for span in report.spans if span.document_id == "chinese"]
    assert set(kinds) == {SpanKind.EXACT}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_document_is_found(kind):
    engine, cut = engine_of(kind), TEXTS["english"][:70]
    report = engine.score(f"{LEAD}{cut}{QUESTION}", (7,), repair="none").report
    found = [span for span in report.spans if span.document_id == "english"]
    assert found
    assert (report.tokens(SpanKind.APPROXIMATE) > 0) == (kind != "python"), "a cut needs character offsets"
    if kind != "python":
        _, offsets = engine._tokens.document_with_offsets(TEXTS["english"])
        assert sum(span.tokens for span in found) == sum(end <= len(cut) for _, end in offsets)


# Templates ---------------------------------------------------------------------------------------------------------

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
TRIMMED = TEMPLATE.replace("m['content']", "m['content'] | trim")
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATE
)
THINKING = TEMPLATE + "{% if add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
KIND = "<|im_start|>system\nBe kind.<|im_end|>\n"
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}" + KIND + "{% endif %}" + TEMPLATE
BOS_WRITTEN = "{{ bos_token }}" + TEMPLATE


def templated(template):
    tokenizer = byte_level(bos=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [TEMPLATE, NO_SYSTEM, TRIMMED, WITH_TOOLS, THINKING, DEFAULT_SYSTEM, BOS_WRITTEN])
def test_the_prompt_is_what_the_template_renders(template):
    tokenizer = templated(template)
    engine = engine_with(tokenizer)
    content = f"{LEAD}{TEXTS['arabic']}{BETWEEN}{TEXTS['code']}{QUESTION}"
    messages = [{"role": "user", "content": content}]
    ids = engine.tokenize(messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered
    report = engine.score(messages, (7,), repair="none").report
    assert {span.document_id for span in report.spans} - {None} == {"arabic", "code"}


def test_bos_is_neither_lost_nor_doubled():
    for template, count in ((TEMPLATE, 0), (BOS_WRITTEN, 1)):
        tokenizer = templated(template)
        engine = engine_with(tokenizer)
        ids = engine.tokenize([{"role": "user", "content": "Where?"}]).tolist()
        assert ids.count(tokenizer.bos_token_id) == count
        assert engine.tokenize("Where?").tolist() == tokenizer("Where?").input_ids
        assert engine.tokenize("<s>Where?").tolist().count(tokenizer.bos_token_id) == 1


def test_a_template_without_system_role_names_the_problem():
    engine = engine_with(templated(NO_SYSTEM))
    with pytest.raises(ValueError, match="no system role"):
        engine.generate([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where?"}])


def test_tools_and_thinking_reach_the_template():
    tokenizer = templated(WITH_TOOLS)
    tool = {"type": "function", "function": {"name": "lookup", "description": "Looks up.", "parameters": {}}}
    ids = engine_with(tokenizer).tokenize("Where?", documents=["code"], template_options={"tools": [tool]})
    assert '"lookup"' in tokenizer.decode(ids)
    tokenizer = templated(THINKING)
    engine = engine_with(tokenizer)
    off, on = (engine.tokenize("Where?", documents=["code"], template_options={"enable_thinking": on}) for on in (0, 1))
    assert tokenizer.decode(off).endswith("</think>\n\n")
    assert not tokenizer.decode(on).endswith("</think>\n\n")


def test_the_head_is_read_like_the_beginning_of_a_prompt():
    """Else no document would be exact behind it."""
    for kind in KINDS:
        tokens = Tokens(tokenizer_of(kind))
        renderer = Renderer(tokenizer_of(kind), Layout(), tokens.cuts)
        head = tokens.template(renderer.head, first=True, goes_on=True)
        ids = engine_of(kind).tokenize("Where?", documents=["english"])
        assert ids[: len(head)].tolist() == head.tolist()


def test_bench_compares_with_the_prompt_tokenised_as_one_text():
    tokenizer, documents = tokenizer_of("byte-level"), (Document("a", "he meeting is"), Document("b", "nch is served"))
    layout = Layout(lead_in="T", separator="\n\nLu", question="\nWhere? {question}", chat=False)
    with KVBoostEngine(model(), tokenizer, layout=layout) as engine:
        question = Question("When?", documents)
        first = {name: make_method(name, engine, 0).first_token(question) for name in ("full", "joint")}
    whole = tokenizer("The meeting is\n\nLunch is served\nWhere? When?").input_ids
    assert first["joint"].prompt_tokens == len(whole) < first["full"].prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", ["\n\n", "\n", "\n---\n", ". ", "", "x", "<|im_end|>\n", "\n\n  "])
def test_text_before_a_document_keeps_all_of_its_text(kind, between):
    tokenizer = tokenizer_of(kind)
    tokens = Tokens(tokenizer)
    joint = [*tokens.document("end."), *tokens.template(between, goes_on=True), *tokens.document("Begin")]
    assert tokenizer.decode(joint) == tokenizer.decode([*tokens.document("end."), *tokens.template(between + "Begin")])


@pytest.mark.real
def test_the_small_model_reads_pieces_as_one_text(smollm2):
    """Its tokenizer takes two line breaks for one token where a text ends, and for two before a word."""
    _, tokenizer = smollm2
    tokens = Tokens(tokenizer)
    texts = [TEXTS["english"], TEXTS["chinese"], TEXTS["arabic"]]
    parts = [tokens.template("Documents:\n\n", first=True, goes_on=True)]
    for text in texts:
        parts += [tokens.document(text), tokens.template("\n\n", goes_on=True)]
    pieces = [int(i) for part in parts[:-1] for i in part]
    assert pieces == tokenizer("Documents:\n\n" + "\n\n".join(texts)).input_ids
