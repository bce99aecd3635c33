"""Repair methods choose what they say, and cost what they say."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.model import ModelRunner, Probe
from kvboost_rag.repair import CacheBlend, NoRepair, QuestionGuided, RandomRepair, Selective, parse_repair
from kvboost_rag.types import Span

SPANS = [Span(10, 20, SpanKind.APPROXIMATE, "a"), Span(20, 24, SpanKind.APPROXIMATE, "b")]
TEXTS = [f"Document number {i} tells of {w} and of nothing else, as far as anyone knows." for i, w in enumerate("xyz")]


def probe(deviation, layer=1, layers=8):
    """A probe over the spans' tokens whose values deviate as given."""
    positions = torch.arange(10, 24)
    new = torch.zeros(1, 14, 2)
    new[0, :, 0] = torch.as_tensor(deviation, dtype=torch.float)
    zero = torch.zeros_like(new)
    return Probe(layer, layers, positions, zero, new, zero, zero)


def test_none_chooses_nothing():
    assert NoRepair().select(SPANS).numel() == 0


@pytest.mark.parametrize(("tokens", "expected"), [(0, []), (3, [10, 11, 12, 20, 21, 22]), (99, list(range(10, 24)))])
def test_selective_takes_the_head_of_every_piece(tokens, expected):
    assert Selective(tokens).select(SPANS).tolist() == expected


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.01, 1), (0.5, 7), (1.0, 14)])
def test_random_takes_its_share_ascending_and_always_the_same(ratio, count):
    chosen = RandomRepair(ratio).select(SPANS)
    assert chosen.numel() == count
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(range(10, 24))
    assert torch.equal(chosen, RandomRepair(ratio).select(SPANS))


def test_cacheblend_keeps_the_tokens_that_deviate_most():
    deviation = [0, 5, 0, 1, 9, 0, 0, 0, 0, 0, 0, 7, 0, 0]
    assert CacheBlend(0.2).narrow(probe(deviation), SPANS).tolist() == [1, 4, 11]
    assert CacheBlend(0.2, deviation="keys").narrow(probe(deviation), SPANS).numel() == 3


def test_cacheblend_keeps_its_seed_first():
    deviation = [0, 5, 0, 1, 9, 0, 0, 0, 0, 0, 0, 7, 0, 0]
    assert CacheBlend(0.2, seed=Selective(1)).narrow(probe(deviation), SPANS).tolist() == [0, 4, 10]


def test_question_keeps_what_is_attended_most():
    attention = torch.zeros(30)
    attention[[5, 11, 14, 22, 29]] = torch.tensor([9.0, 3.0, 1.0, 2.0, 9.0])
    assert QuestionGuided(0.2).select(SPANS, attention).tolist() == [11, 14, 22]
    assert QuestionGuided(0.2, first=1).select(SPANS, attention).tolist() == [10, 11, 20]
    assert QuestionGuided(1.0).select(SPANS).tolist() == list(range(10, 24))
    assert QuestionGuided(0.0).select(SPANS).numel() == 0


def test_question_looks_ahead_only_where_there_is_a_choice():
    assert list(QuestionGuided(0.1).question_layers(30)) == [15, 16, 17]
    assert list(QuestionGuided(0.1, depth=0.01).question_layers(4)) == [0]
    assert list(QuestionGuided(0.1, depth=0.99).question_layers(2)) == [0]
    assert not QuestionGuided(0.0).question_layers(30)
    assert not QuestionGuided(1.0).question_layers(30)


def test_gradual_narrowing_keeps_the_ratio_on_average():
    method = CacheBlend(0.2, gradual=True)
    layers = list(method.probe_layers(8))
    assert layers == [1, 3, 5]
    kept = [method.narrow(probe(range(14), layer), SPANS).numel() for layer in layers]
    assert kept == [5, 3, 3]


@pytest.mark.parametrize(
    "spec",
    ["none", "selective:16", "random:0.15", "random:0.15:seed=3", "cacheblend:0.15", "cacheblend:0.15:probe_layer=2",
     "cacheblend:0.3:deviation=keys:gradual=true", "selective:8+cacheblend:0.15", "selective:16+cacheblend:0.2",
     "question:0.05", "question:0.1:depth=0.5:first=2"],
)
def test_specifications_round_trip(spec):
    assert parse_repair(spec).name == spec
    assert parse_repair(parse_repair(spec)).name == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("magic", "known are none, selective"),
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
        ("question:0.1:first=-1", "at least 0"),
        ("none:3", "does not understand"),
        ("none+selective:3", "only cacheblend takes a seed"),
        ("cacheblend:0.1+cacheblend:0.2", "can not seed"),
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


@pytest.mark.parametrize("spec", ["cacheblend:0.25", "cacheblend:0.25:probe_layer=2", "selective:4+cacheblend:0.25"])
def test_cacheblend_runs_few_tokens_through_the_layers_behind_the_probe(spec):
    """The cost is (probe layer / layers + ratio) of a prefill, never a prefill."""
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    widths = [[] for _ in engine.model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda m, args, w=w: w.append(args[0].shape[1]))
        for layer, w in zip(engine.model.model.layers, widths, strict=True)
    ]
    report = engine.generate("Why?", documents=["2", "1", "0"], repair=spec, max_tokens=1).report
    for hook in hooks:
        hook.remove()
    other = len(TEXTS[1]) + len(TEXTS[0])
    kept = -(-other // 4)
    computed = report.tokens(SpanKind.COMPUTED)
    assert report.tokens(SpanKind.RECOMPUTED) == kept
    assert report.tokens(SpanKind.APPROXIMATE) == other - kept
    full = parse_repair(spec).probe_layers(4)[0]
    assert widths == [[other + computed]] * full + [[kept + computed]] * (4 - full)


def test_question_runs_every_token_once_through_every_layer():
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document(str(i), t) for i, t in enumerate(TEXTS)])
    widths = [[] for _ in engine.model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda m, args, w=w: w.append(args[0].shape[1]))
        for layer, w in zip(engine.model.model.layers, widths, strict=True)
    ]
    report = engine.generate("Why?", documents=["2", "1", "0"], repair="question:0.1:depth=0.5", max_tokens=1).report
    for hook in hooks:
        hook.remove()
    computed, recomputed = report.tokens(SpanKind.COMPUTED), report.tokens(SpanKind.RECOMPUTED)
    assert recomputed == -(-(len(TEXTS[0]) + len(TEXTS[1])) // 10)
    assert widths == [[computed, recomputed]] * 2 + [[computed + recomputed]] * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_the_question_is_the_models_own(family, implementation):
    model = tiny_model(family)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.arange(60) * 7 % 250
    with torch.inference_mode():
        expected = torch.stack(model(input_ids=ids[None], output_attentions=True).attentions)[1:3, 0, :, -10:]
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers runs this family with eager attention only")
    model.set_attn_implementation(implementation)
    runner, everywhere, question = ModelRunner(model), torch.arange(60), torch.arange(46, 60)
    cache = runner.new_cache(60)
    runner.forward(ids, everywhere, cache, 60)
    cache.keys[:, :, :, 46:] = cache.values[:, :, :, 46:] = 9.0
    ahead = runner.look_ahead(ids[46:], question, cache, 60, layer=3, watch=(1, 2), question=10)
    model.set_attn_implementation(before)
    assert (ahead.attention - expected.mean(dim=(0, 1, 2))).abs().max() < 1e-5
    assert ahead.attention.sum() == pytest.approx(1.0, abs=1e-4)
    # Everything below was exact, so joining half-way gives the logits of one forward.
    part = torch.arange(40, 60)
    got = runner.forward(ids[part], part, cache, 60, ahead=ahead)
    assert (got - runner.plain_logits(ids)).abs().max() < 1e-3


def test_attention_that_can_not_be_watched_is_refused():
    model = tiny_model("llama")
    runner = ModelRunner(model)
    before, model.config._attn_implementation = model.config._attn_implementation, "flash_attention_2"
    try:
        with pytest.raises(ValueError, match="'flash_attention_2' does not show; load the model with"):
            runner.look_ahead(torch.arange(3), torch.arange(3), runner.new_cache(3), 3, 2, (1,), question=1)
    finally:
        model.config._attn_implementation = before


def test_an_exact_document_gets_no_repair():
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer())
    engine.add_documents([Document("0", TEXTS[0])])
    for spec in ("selective:16", "random:0.5", "cacheblend:0.5", "cacheblend:0.5:gradual=true", "question:0.5"):
        report = engine.generate("Why?", documents=["0"], repair=spec, max_tokens=1).report
        assert report.tokens(SpanKind.RECOMPUTED) == 0
        engine._prefixes._entries = [e for e in engine._prefixes._entries if e.pinned]
