"""``auto`` takes what was measured, says what it took, and declines where reuse would not pay."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer, wide_model

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.cli import main
from kvboost_rag.demo_documents import demo_documents
from kvboost_rag.policy import QUALITIES, Policy, PolicyPoint, target_of
from kvboost_rag.repair import Auto, CacheBlend, parse_repair

POINTS = (
    PolicyPoint("none", 0.07, 0.06, 0.2, 30),
    PolicyPoint("random:0.1", 0.12, 0.02, 0.2, 30),
    PolicyPoint("sensitive:0.1", 0.15, 0.025, 0.1, 30),
    PolicyPoint("selective:32", 0.2, 0.02, 0.1, 30),
    PolicyPoint("cacheblend:0.5", 0.6, 0.011, 0.05, 30),
)
POLICY = Policy(POINTS, "made up")
TEXTS = [f"Document number {i} tells of {w} and of nothing else, as far as anyone knows." for i, w in enumerate("xyz")]


def make_engine(**options) -> KVBoostEngine:
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), **options)
    engine.add_documents([Document(str(i), text) for i, text in enumerate(TEXTS)])
    return engine


@pytest.mark.parametrize(
    ("quality", "repair"),
    [
        ("floor", "none"),
        ("standard", "sensitive:0.1"),  # random is cheaper, but its tail is too long
        (0.02, "selective:32"),
        ("0.02", "selective:32"),
    ],
)
def test_the_cheapest_that_reaches_the_quality(quality, repair):
    assert POLICY.choose(quality).repair == repair


def test_a_quality_that_nothing_reaches_is_computed_in_full_and_says_so():
    assert POLICY.choose("safe") is None
    with make_engine(policy=POLICY) as engine:
        options = {"documents": ["2", "1", "0"]}
        got = engine.score("Why?", [1, 2, 3], quality="safe", **options)
        assert got.report.repair == "auto:safe = full prefill"
        assert "no repair was measured to reach auto:safe" in got.report.fallback
        assert "fallback: no repair" in str(got.report)
        full = engine.score("Why?", [1, 2, 3], reuse=False, **options)
        assert (got.logits - full.logits).abs().max() < 1e-3


@pytest.mark.parametrize("quality", ["best", "", "-1", 0, "nan", "inf"])
def test_qualities_that_mean_nothing(quality):
    with pytest.raises(ValueError, match="pass floor, standard, safe, or a KL above 0"):
        target_of(quality)


def test_a_policy_survives_the_disk(tmp_path):
    POLICY.save(tmp_path / "p.json")
    assert Policy.load(tmp_path / "p.json") == POLICY
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


NO_POLICIES = ["", "[]", "{}", '{"source": "x", "points": []}', '{"source": "x", "points": [{"a": 1}]}']


@pytest.mark.parametrize("text", NO_POLICIES)
def test_a_damaged_policy_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json is not a policy .*calibrate again"):
        Policy.load(tmp_path / "p.json")


def test_shipped_policies_hold_repairs_that_exist_and_the_unknown_family_gets_the_worst():
    families = [Policy.shipped(name) for name in ("llama", "qwen2")]
    unknown = Policy.shipped("made-up")
    for policy in (*families, unknown):
        for point in policy.points:
            assert parse_repair(point.repair).name == point.repair
    for point in unknown.points:
        same = [p for policy in families for p in policy.points if p.repair == point.repair]
        assert len(same) == len(families)
        assert point.kl == max(p.kl for p in same)
        assert point.ttft_ratio == max(p.ttft_ratio for p in same)


def test_documents_behind_the_generic_texts_have_figures_of_their_own():
    measured = Policy.shipped("llama", generic=True)
    assert "generic" in measured.source
    assert "generic" in Policy.shipped("qwen2", generic=True).source
    assert Policy.shipped("made-up", generic=True) == Policy.shipped("made-up")
    for contexts, expected in (("generic", measured), (["A text."], Policy.shipped("llama"))):
        with KVBoostEngine(wide_model(), tiny_tokenizer(), context_documents=contexts) as engine:
            assert engine.policy == expected


def test_auto_is_the_default_and_the_report_says_what_it_stands_for():
    with make_engine(policy=POLICY) as engine:
        report = engine.generate("Why?", documents=["2", "1", "0"], max_tokens=1).report
        assert report.repair == "auto:standard = sensitive:0.1"
        assert report.tokens(SpanKind.RECOMPUTED) == -(-(len(TEXTS[0]) + len(TEXTS[1])) // 10)
        for options, expected in (
            ({"quality": 0.012}, "auto:0.012 = cacheblend:0.5"),
            ({"quality": 0.2}, "auto:0.2 = none"),
            ({"repair": "auto:floor"}, "auto:floor = none"),
            ({"repair": "none"}, "none"),
        ):
            assert engine.generate("Who?", documents=["1", "0"], max_tokens=1, **options).report.repair == expected
    with make_engine(policy=POLICY, quality="floor") as engine:
        assert engine.generate("Who?", documents=["1", "0"], max_tokens=1).report.repair == "auto:floor = none"


@pytest.mark.parametrize("spec", ["sensitive:0.25", "question:0.25:depth=0.5", "selective:3+cacheblend:0.25"])
def test_auto_gives_what_the_chosen_method_gives(spec):
    policy = Policy((PolicyPoint(spec, 0.1, 0.01, 0.01, 1),), "made up")
    with make_engine(policy=policy) as engine:
        one, other = (
            engine.score("Why?", [1, 2, 3], documents=["2", "1", "0"], repair=repair) for repair in ("auto", spec)
        )
    assert torch.equal(one.logits, other.logits)
    assert [s.kind for s in one.report.spans] == [s.kind for s in other.report.spans]


def test_earlier_prompts_of_another_choice_are_not_taken_for_this_ones():
    with make_engine() as engine:
        for spec in ("none", "sensitive:1.0"):
            policy = Policy((PolicyPoint(spec, 0.1, 0.01, 0.01, 1),), "made up")
            got = engine.generate(
                "Why?", documents=["2", "1", "0"], max_tokens=1, repair=parse_repair("auto", policy)
            ).report
            assert (got.tokens(SpanKind.RECOMPUTED) > 0) is (spec != "none")


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (("magic", 0.1, 0.1, 0.1, 1), "unknown repair 'magic'.*calibrate again"),
        (("auto:safe", 0.1, 0.1, 0.1, 1), "unknown repair 'auto'"),
        (("none", 0.1, "low", 0.1, 1), "kl of none is 'low'"),
        (("none", 0.1, float("nan"), 0.1, 1), "kl of none is nan"),
        (("none", None, 0.1, 0.1, 1), "ttft_ratio of none is None"),
        ((3, 0.1, 0.1, 0.1, 1), "repair 3 is no text"),
    ],
)
def test_policies_that_can_not_be_meant(point, message):
    with pytest.raises(ValueError, match=message):
        make_engine(policy=Policy((PolicyPoint(*point),), "made up"))


def test_a_policy_without_points_is_refused():
    with pytest.raises(ValueError, match="holds no points"):
        Policy((), "made up")


def test_quality_and_another_repair_contradict_each_other():
    with pytest.raises(ValueError, match="pass one of the two"):
        make_engine(repair="none", quality="safe")


def test_auto_computes_what_would_not_pay_and_says_so():
    with make_engine(policy=POLICY) as engine:
        engine.add_documents([Document("short", "It was seven.")])
        documents = ["0", "short"]
        got = engine.score("Why?", [1, 2, 3], documents=documents)
        assert "13 tokens with another history were computed" in got.report.fallback
        assert got.report.tokens(SpanKind.APPROXIMATE) == 0
        full = engine.score("Why?", [1, 2, 3], documents=documents, reuse=False)
        assert (got.logits - full.logits).abs().max() < 1e-3
        assert engine.generate("Who?", documents=documents, max_tokens=1, repair="none").report.fallback == ""


def test_an_exact_document_is_no_fallback():
    with make_engine(policy=POLICY) as engine:
        for number, quality in enumerate(("standard", "safe")):
            report = engine.generate(f"Why {number}?", documents=["0"], max_tokens=1, quality=quality).report
            assert report.fallback == ""
            assert report.tokens(SpanKind.EXACT) > len(TEXTS[0])


def test_a_calibration_in_the_cache_folder_counts_for_that_head_alone(tmp_path):
    with make_engine(cache_dir=tmp_path) as engine:
        assert engine.policy == Policy.shipped("llama")
        POLICY.save(engine.policy_path)
    with make_engine(cache_dir=tmp_path) as engine:
        assert engine.policy == POLICY
    with make_engine(cache_dir=tmp_path, context_documents=["Another context."]) as engine:
        assert engine.policy == Policy.shipped("llama")


def test_seeds_of_auto_are_refused():
    with pytest.raises(ValueError, match="unknown repair 'auto'"):
        parse_repair("selective:3+auto:safe")
    assert isinstance(parse_repair("auto"), Auto)
    assert isinstance(parse_repair("auto:0.012", POLICY).chosen, CacheBlend)


# Calibration


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    docs = tmp_path / "docs"
    docs.mkdir()
    for document in demo_documents()[:4]:
        (docs / f"{document.id}.txt").write_text(document.text[:120] + ".", encoding="utf-8")
    return tmp_path


def test_calibrate_leaves_a_policy_that_auto_uses(folder, capsys):
    arguments = ["calibrate", "--model", str(folder / "model"), "--docs", str(folder / "docs"), "--samples", "2"]
    arguments += ["--k", "2", "--layout", "chat", "--cache-dir", str(folder / "cache"), "--plot", str(folder / "f.png")]
    assert main([*arguments, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out["chosen"]) == set(QUALITIES)
    assert (folder / "f.png").read_bytes()[:4] == b"\x89PNG"
    from kvboost_rag.layouts import CHAT

    model = str(folder / "model")
    with KVBoostEngine.from_pretrained(model, layout=CHAT, cache_dir=folder / "cache") as engine:
        assert str(engine.policy_path) == out["policy"]
        assert engine.policy.source.startswith("calibrated on calibration-")
        assert {p.repair for p in engine.policy.points} == set(out["summary"]) - {"full"}
    (folder / "context.txt").write_text("A text of no subject.", encoding="utf-8")
    assert main([*arguments, "--context-documents", str(folder / "context.txt")]) == 0
    text = capsys.readouterr().out
    assert "auto:standard" in text
    assert "policy in" in text
    contexts = ["A text of no subject."]
    options = {"layout": CHAT, "cache_dir": folder / "cache", "context_documents": contexts}
    with KVBoostEngine.from_pretrained(model, **options) as engine:
        assert str(engine.policy_path) in text
        assert engine.policy.source.startswith("calibrated on calibration-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--docs", "{docs}", "--data", "{docs}"], "leave --docs out"),
        (["--docs", "nowhere"], "not a folder"),
        (["--docs", "{docs}/one"], "at least 2 documents"),
        (["--docs", "{docs}/dull"], "no document holds a sentence"),
        (["--docs", "{docs}", "--k", "1"], "ask for 2 documents a question"),
        (["--docs", "{docs}", "--plot", "f.txt"], "neither .png nor .svg"),
        (["--docs", "{docs}", "--plot", "nowhere/f.png"], "does not exist"),
    ],
)
def test_calibrations_that_can_not_be(folder, capsys, arguments, message):
    for name, texts in (("one", ["This is a sentence of some length."]), ("dull", ["word", "words"])):
        (folder / "docs" / name).mkdir()
        for i, text in enumerate(texts):
            (folder / "docs" / name / f"{i}.txt").write_text(text)
    arguments = [a.format(docs=folder / "docs") for a in arguments]
    assert main(["calibrate", "--cache-dir", str(folder / "cache"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
