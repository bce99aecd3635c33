"""Repair methods choose what they say, and cost what they say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.model import ModelRunner, Probe
from kvboost_rag.repair import (
    CacheBlend,
    Clues,
    NoRepair,
    QuestionGuided,
    RandomRepair,
    Selective,
    Sensitive,
    parse_repair,
)  # fmt: skip
from kvboost_rag.repair.base import share_of
from kvboost_rag.types import Span

SPANS = [Span(10, 20, SpanKind.APPROXIMATE, "a"), Span(20, 24, SpanKind.APPROXIMATE, "b")]
NOTHING = Clues(torch.zeros(30))
TEXTS = [f"Document number {i} tells of {w} and of nothing else, as far as anyone knows." for i, w in enumerate("xyz")]
# Their sdpa does not go through the attention functions that transformers lets others register.
OWN_SDPA = ("stablelm",)


def probe(deviation, layer=1, layers=8):
    """A probe over the spans' tokens whose values deviate as given."""
    positions = torch.arange(10, 24)
    new = torch.zeros(1, 14, 2)
    new[0, :, 0] = torch.as_tensor(deviation, dtype=torch.float)
    zero = torch.zeros_like(new)
    return Probe(layer, layers, positions, zero, new, zero, zero)


def test_none_chooses_nothing():
    assert NoRepair().select(SPANS, NOTHING).numel() == 0


@pytest.mark.parametrize(("tokens", "expected"), [(0, []), (3, [10, 11, 12, 20, 21, 22]), (99, list(range(10, 24)))])
def test_selective_takes_the_head_of_every_piece(tokens, expected):
    assert Selective(tokens).select(SPANS, NOTHING).tolist() == expected


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.01, 1), (0.5, 7), (1.0, 14)])
def test_random_takes_its_share_ascending_and_always_the_same(ratio, count):
    chosen = RandomRepair(ratio).select(SPANS, NOTHING)
    assert chosen.numel() == count
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(range(10, 24))
    assert torch.equal(chosen, RandomRepair(ratio).select(SPANS, NOTHING))


def test_cacheblend_keeps_the_tokens_that_deviate_most():
    deviation = [0, 5, 0, 1, 9, 0, 0, 0, 0, 0, 0, 7, 0, 0]
    assert CacheBlend(0.2).narrow(probe(deviation), SPANS, NOTHING).tolist() == [1, 4, 11]
    assert CacheBlend(0.2, deviation="keys").narrow(probe(deviation), SPANS, NOTHING).numel() == 3


def test_cacheblend_keeps_its_seed_first():
    deviation = [0, 5, 0, 1, 9, 0, 0, 0, 0, 0, 0, 7, 0, 0]
    assert CacheBlend(0.2, seed=Selective(1)).narrow(probe(deviation), SPANS, NOTHING).tolist() == [0, 4, 10]


def clues(sensitivity, attention=None):
    out = [torch.zeros(30), None if attention is None else torch.zeros(30)]
    for tensor, values in zip(out, (sensitivity, attention), strict=True):
        for position, value in (values or {}).items():
            tensor[position] = value
    return Clues(*out)


def test_sensitive_keeps_what_its_context_changes_most():
    known = clues({5: 9, 11: 3, 14: 1, 22: 2, 29: 9})
    assert Sensitive(0.2).select(SPANS, known).tolist() == [11, 14, 22]
    assert Sensitive(0.2, seed=Selective(1)).select(SPANS, known).tolist() == [10, 11, 20]
    assert Sensitive(1.0).select(SPANS, known).tolist() == list(range(10, 24))
    assert Sensitive(0.0).select(SPANS, known).numel() == 0


def test_question_keeps_what_is_attended_and_sensitive():
    known = clues({11: 1, 12: 1, 14: 3, 22: 4}, {5: 9, 11: 4, 12: 1, 13: 7, 14: 1, 22: 2, 29: 9})
    assert QuestionGuided(0.2).select(SPANS, known).tolist() == [11, 14, 22]
    assert QuestionGuided(0.2, weigh=False).select(SPANS, known).tolist() == [11, 13, 22]
    assert QuestionGuided(0.2, seed=Selective(1)).select(SPANS, known).tolist() == [10, 20, 22]
    assert QuestionGuided(1.0).select(SPANS, NOTHING).tolist() == list(range(10, 24))
    assert QuestionGuided(0.0).select(SPANS, NOTHING).numel() == 0


def test_question_looks_ahead_only_where_there_is_a_choice():
    assert list(QuestionGuided(0.1).question_layers(30)) == [18, 19, 20]
    assert list(QuestionGuided(0.1, depth=0.01).question_layers(4)) == [0]
    assert list(QuestionGuided(0.1, depth=0.99).question_layers(2)) == [0]
    assert not QuestionGuided(0.0).question_layers(30)
    assert not QuestionGuided(1.0).question_layers(30)


def test_gradual_narrowing_keeps_the_ratio_on_average():
    method = CacheBlend(0.2, gradual=True)
    layers = list(method.probe_layers(8))
    assert layers == [1, 3, 5]
    kept = [method.narrow(probe(range(14), layer), SPANS, NOTHING).numel() for layer in layers]
    assert kept == [5, 3, 3]


@pytest.mark.parametrize(
    "spec",
    ["none", "selective:16", "random:0.15", "random:0.15:seed=3", "cacheblend:0.15", "cacheblend:0.15:probe_layer=2",
     "cacheblend:0.3:deviation=keys:gradual=true", "selective:8+cacheblend:0.15", "selective:16+cacheblend:0.2",
     "question:0.05", "question:0.1:depth=0.5:weigh=false", "selective:2+question:0.1", "sensitive:0.05",
     "sensitive:0.02+cacheblend:0.15", "selective:2+sensitive:0.08"],
)
def test_specifications_round_trip(spec):
    assert parse_repair(spec).name == spec
    assert parse_repair(parse_repair(spec)).name == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("magic", "known are auto, none, selective"),
        ("", "known are"),
        ("selective:x", "tokens can not be 'x'"),
        ("selective:-1", ">= 0"),
        ("random:1.5", "between 0 and 1"),
        ("cacheblend:0.1:depth=3", "does not understand 'depth=3'"),
        ("cacheblend:0.1:0.2", "does not understand"),
        ("cacheblend:0.1:deviation=size", "'keys', 'values' or 'both'"),
        ("cacheblend:0.1:gradual=yes", "gradual can not be 'yes'"),
        ("cacheblend:0.1:probe_layer=0", "starts at 1"),
        ("question:1.1", "between 0 and 1"),
        ("question:0.1:depth=1.0", "share of the layers"),
        ("question:0.1:weigh=yes", "weigh can not be 'yes'"),
        ("sensitive:-0.1", "between 0 and 1"),
        ("none:3", "does not understand"),
        ("none+selective:3", "only sensitive, question, cacheblend take a seed"),
        ("cacheblend:0.1+cacheblend:0.2", "can not seed cacheblend"),
        ("question:0.1+sensitive:0.2", "can not seed sensitive"),
        ("cacheblend:0.1+question:0.2", "can not seed question"),
    ],
)
def test_what_can_not_be_meant_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_repair(spec)


def test_a_probe_layer_beyond_the_model_is_refused():
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    with pytest.raises(ValueError, match="probe_layer is 9, but the model has 4 layers"):
        engine.generate("Why?", documents=["1", "0"], repair="cacheblend:0.1:probe_layer=9", max_tokens=1)


def asked_with_widths(engine: KVBoostEngine, spec: str):
    """Ask; return the report and, for each layer, how many tokens ran through it in each forward."""
    widths = [[] for _ in engine.model.model.layers]
    with ExitStack() as stack:
        for layer, w in zip(engine.model.model.layers, widths, strict=True):
            hook = layer.mlp.register_forward_pre_hook(lambda m, args, w=w: w.append(args[0].shape[1]))
            stack.callback(hook.remove)
        report = engine.generate("Why?", documents=["2", "1", "0"], repair=spec, max_tokens=1).report
    return report, widths


@pytest.mark.parametrize("spec", ["cacheblend:0.25", "cacheblend:0.25:probe_layer=2", "selective:4+cacheblend:0.25"])
def test_cacheblend_runs_few_tokens_through_the_layers_behind_the_probe(spec):
    """The cost is (probe layer / layers + ratio) of a prefill, never a prefill."""
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    report, widths = asked_with_widths(engine, spec)
    other = len(TEXTS[1]) + len(TEXTS[0])
    kept = -(-other // 4)
    computed = report.tokens(SpanKind.COMPUTED)
    assert report.tokens(SpanKind.RECOMPUTED) == kept
    assert report.tokens(SpanKind.APPROXIMATE) == other - kept
    full = parse_repair(spec).probe_layers(4)[0]
    assert widths == [[other + computed]] * full + [[kept + computed]] * (4 - full)


@pytest.mark.parametrize(("spec", "ahead"), [("question:0.1:depth=0.5", 2), ("sensitive:0.1", 0)])
def test_no_token_runs_that_is_not_recomputed(spec, ahead):
    """Question-guided repair pays a part of the question's pass beforehand, sensitive pays nothing."""
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    report, widths = asked_with_widths(engine, spec)
    computed, recomputed = report.tokens(SpanKind.COMPUTED), report.tokens(SpanKind.RECOMPUTED)
    assert recomputed == -(-(len(TEXTS[0]) + len(TEXTS[1])) // 10)
    assert widths == [[computed, computed + recomputed]] * ahead + [[computed + recomputed]] * (4 - ahead)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_the_question_is_the_models_own(family, implementation):
    model = tiny_model(family)
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    if implementation == "sdpa" and (capped or not model._supports_sdpa or family in OWN_SDPA):
        pytest.skip("transformers has no sdpa for this family, or one that leaves its soft cap out")
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.arange(60) * 7 % 250
    with torch.inference_mode():
        expected = torch.stack(model(input_ids=ids[None], output_attentions=True).attentions)[1:3, 0, :, -10:]
    model.set_attn_implementation(implementation)
    runner, everywhere, question = ModelRunner(model), torch.arange(60), torch.arange(46, 60)
    cache = runner.new_cache(60)
    runner.forward(ids, everywhere, cache, 60)
    cache.keys[:, :, :, 46:] = cache.values[:, :, :, 46:] = 9.0
    got = runner.question_attention(ids[46:], question, cache, 60, layers=(1, 2), last=10)
    model.set_attn_implementation(before)
    assert (got - expected.mean(dim=(0, 1, 2))).abs().max() < 1e-5
    # Attention sinks of the model's own take what is missing.
    assert got.sum() == pytest.approx(float(expected.mean(dim=(0, 1, 2)).sum()), abs=1e-4)


@pytest.mark.parametrize("family", [family for family in OWN_SDPA if family in FAMILIES])
def test_a_family_with_an_sdpa_of_its_own_is_refused_by_question_guided_repair_alone(family):
    engine = KVBoostEngine(tiny_model(family), tiny_tokenizer())
    engine.add_documents([Document(str(i), text) for i, text in enumerate(TEXTS)])
    with pytest.raises(ValueError, match="StableLmForCausalLM does not show with 'sdpa'; choose another repair"):
        engine.generate("Why?", documents=["0", "1"], repair="question:0.1", max_tokens=1)
    engine.generate("Why?", documents=["0", "1"], repair="sensitive:0.1", max_tokens=1)


def test_attention_that_can_not_be_watched_is_refused():
    model = tiny_model("llama")
    runner = ModelRunner(model)
    before, model.config._attn_implementation = model.config._attn_implementation, "flash_attention_2"
    try:
        with pytest.raises(ValueError, match="'flash_attention_2' does not show; load the model with"):
            runner.question_attention(torch.arange(3), torch.arange(3), runner.new_cache(3), 3, layers=(1,), last=1)
    finally:
        model.config._attn_implementation = before


def test_an_exact_document_gets_no_repair():
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document("0", TEXTS[0])])
    gradual = "cacheblend:0.5:gradual=true"
    specs = ("selective:16", "random:0.5", "cacheblend:0.5", gradual, "question:0.5", "sensitive:0.5")
    for spec in specs:
        report = engine.generate("Why?", documents=["0"], repair=spec, max_tokens=1).report
        assert report.tokens(SpanKind.RECOMPUTED) == 0
        engine._prefixes._entries = [e for e in engine._prefixes._entries if e.pinned]


def test_a_share_is_not_rounded_up_by_chance():
    for ratio, tokens, expected in ((0.07, 100, 7), (0.14, 50, 7), (0.001, 100, 1), (1.0, 7, 7)):
        assert share_of(ratio, tokens) == expected


def test_of_too_many_seeds_the_best_ones_are_taken():
    known = clues({10: 1, 11: 5, 12: 3, 13: 4, 20: 2, 23: 9})
    assert Sensitive(0.2, seed=Selective(4)).select(SPANS, known).tolist() == [11, 13, 23]


def test_the_attention_that_counts_is_that_of_the_question(monkeypatch):
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    asked, attention = [], ModelRunner.question_attention
    monkeypatch.setattr(ModelRunner, "question_attention", lambda *a: asked.append(a[-1]) or attention(*a))
    report = engine.generate("Why?", documents=["2", "1", "0"], repair="question:0.1", max_tokens=1).report
    assert asked == [report.spans[-1].tokens]
    assert report.spans[-1].kind is SpanKind.COMPUTED


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_two_engines_over_one_model_do_not_see_each_others_attention(implementation):
    model = tiny_model("llama")
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    documents = [Document(str(i), t) for i, t in enumerate(TEXTS)]
    engines = [KVBoostEngine(model, tiny_tokenizer(), max_prefix_bytes=0) for _ in range(2)]
    orders = (["2", "1", "0"], ["0", "2", "1"])

    def ask(engine, order):
        return engine.score("Why?", [1, 2, 3], documents=order, repair="question:0.2").logits

    for engine in engines:
        engine.add_documents(documents)
    expected = [ask(engine, order) for engine, order in zip(engines, orders, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            got = list(pool.map(ask, engines, orders))
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    model.set_attn_implementation(before)
