from __future__ import annotations

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from kvboost_rag import KVBoostEngine, SpanKind
from kvboost_rag.answering import Clock
from kvboost_rag.bench import BenchOptions, add_arguments, format_table, options_from, run_bench
from kvboost_rag.bench.bootstrap import paired_difference
from kvboost_rag.bench.data import filled, fitted, read_samples
from kvboost_rag.bench.measure import Meter
from kvboost_rag.bench.methods import ANSWER_TOKENS, Answered, FirstToken, Method, Question, make_method, token_ids
from kvboost_rag.bench.partial import Partial
from kvboost_rag.bench.plain import PlainModel
from kvboost_rag.bench.quality import answer_text, chosen_letter, divergence, exact_match, normalised, token_f1
from kvboost_rag.bench.setup import build_engine, ingest_rates
from kvboost_rag.bench.summary import summarise
from kvboost_rag.generic_texts import CONTEXT_TEXTS
from kvboost_rag.layouts import CHAT, COMPLETION
from kvboost_rag.policy import Policy, PolicyPoint
from kvboost_rag.session import ReusingAnswer
from kvboost_rag.tokens import Tokens

ANIMALS = ("zebra", "lion", "bear")
SHARED = ("full", "prefix-cache", "none")


def row(number: int = 0, names: tuple[str, ...] = ANIMALS, **changes) -> dict:
    documents = [{"title": name.title(), "text": f"The {name} ran over the plain. It was fast."} for name in names]
    sample = {"id": f"q{number}", "task": "test", "documents": documents, "question": f"What ran, number {number}?"}
    return sample | {"answers": ["zebra"], "choices": None} | changes


def write(path, *rows: dict):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    # As some chat models have it; it must not reach a comparison of logits.
    GenerationConfig(eos_token_id=257, repetition_penalty=1.3).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def options(tmp_path, model):
    def make(*rows: dict, **changes) -> BenchOptions:
        data = write(tmp_path / "data.jsonl", *(rows or [row(i) for i in range(3)]))
        chosen = {"methods": SHARED, "layout": "chat"} | changes
        return BenchOptions(data=data, output=tmp_path / "out.json", model=model, **chosen)

    return make


@pytest.fixture
def engine(options):
    with build_engine(options()) as made:
        yield made


def questions(engine, *rows: dict, tmp_path) -> list[Question]:
    samples = read_samples(write(tmp_path / "questions.jsonl", *rows))
    for sample in samples:
        engine.add_documents(sample.documents)
    return [Question(s.prompt, s.documents) for s in samples]


# A whole run


def test_a_run(options):
    chosen = options(methods=("full", "prefix-cache", "none", "random:1.0", "selective:8+cacheblend:0.2"), repeats=2)
    result = run_bench(chosen)
    assert json.loads(chosen.output.read_text(encoding="utf-8")) == result
    assert [p.name for p in chosen.output.parent.iterdir()] == ["data.jsonl", "out.json"]
    assert [s["id"] for s in result["samples"]] == ["q0", "q1", "q2"]
    summary = result["summary"]
    assert list(summary) == list(chosen.methods)
    full, cached, none, everything, blend = summary.values()
    assert (full["ttft_ratio"], full["kl"], full["top1"], full["exact32"]) == (1, 0, 1, 1)
    assert (full["recomputed_share"], full["reused_share"]) == (1, 0)
    for exact in (cached, everything):
        assert exact["kl_max"] < 1e-5
        assert (exact["top1"], exact["exact32"], exact["recomputed_share"]) == (1, 1, 1)
    assert none["kl"] > 1e-2
    assert (none["recomputed_share"], none["exact32"]) == (0, 0)
    assert 0.2 < blend["recomputed_share"] < 0.3
    assert all(s["n"] == 3 and s["ttft_ms"] > 0 and s["accuracy"] is None for s in summary.values())
    setup = result["setup"]
    assert setup["options"]["methods"] == list(chosen.methods)
    assert {"platform", "processor", "threads", "device"} <= set(setup["machine"])
    assert set(setup["versions"]) == {"python", "torch", "transformers", "kvboost_rag"}
    assert setup["ingest_ratio"] > 0


def test_the_model_folder_is_what_the_tests_assume(model, engine):
    with KVBoostEngine.from_pretrained(model) as raw:
        assert raw.model.generation_config.repetition_penalty == 1.3
    assert engine.model.generation_config.repetition_penalty is None
    assert engine.model.generation_config.eos_token_id == 257


def test_right_answers_count(options):
    answer = run_bench(options(row(0), methods=("full", "none")))["samples"][0]["methods"]["full"]["answer"]
    result = run_bench(options(row(0, answers=["something else", answer]), row(1), methods=("full", "none")))
    assert result["samples"][0]["methods"]["full"]["f1"] == result["samples"][0]["methods"]["full"]["em"] == 1
    assert result["full_failures"] == 1
    assert result["summary"]["full"]["f1"] == 0.5
    assert result["summary"]["full"]["f1_when_full_right"] == 1
    assert result["summary"]["none"]["f1_when_full_right"] < 1


@pytest.mark.parametrize("right", [0, 1, 2])
def test_choices_are_answered_by_letter(options, engine, tmp_path, right):
    choices = ["a horse", "Zebra", "no one"]
    changes = {"choices": choices, "answers": [choices[right].upper()]}
    result = run_bench(options(row(0, **changes), row(1), methods=("full",)))
    (question,) = questions(engine, row(0, **changes), tmp_path=tmp_path)
    assert question.text.endswith("\nA. a horse\nB. Zebra\nC. no one\nAnswer with the letter of the right option.")
    logits = engine.score(question.text, [0], documents=question.documents, reuse=False).logits[0]
    letter_ids = [engine.tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "ABC"]
    expected = float(int(logits[letter_ids].argmax()) == right)
    assert [s["methods"]["full"]["accuracy"] for s in result["samples"]] == [expected, None]
    assert result["summary"]["full"]["accuracy"] == expected
    assert "accuracy" in format_table(result)


def test_a_prompt_over_the_window_is_refused_before_anything_is_measured(options):
    long = [{"title": "x", "text": "word " * 250}]
    chosen = options(row(0), row(1, documents=long))
    with pytest.raises(ValueError, match=r"sample 'q1': the prompt has 13\d\d tokens.*--max-document-tokens and"):
        run_bench(chosen)
    assert not chosen.output.exists()
    assert run_bench(options(row(0), row(1, documents=long), max_document_tokens=100))["samples"][1]["documents"] == 1


def test_a_limit_over_the_file_is_logged(options, caplog):
    with caplog.at_level(logging.WARNING, "kvboost_rag.bench"):
        assert len(run_bench(options(row(), limit=5, methods=("full",)))["samples"]) == 1
    assert "holds 1 samples, not 5" in caplog.text


def test_threads_are_given_back(options, monkeypatch):
    asked = []
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert run_bench(options(row(), methods=("full",), threads=2))
    assert asked == [2, before]


def test_table(options):
    table = format_table(run_bench(options(row())))
    lines = table.splitlines()
    assert lines[0].split()[:3] == ["method", "n", "TTFT"]
    assert [line.split()[0] for line in lines[2:5]] == list(SHARED)
    assert lines[2].split()[1:3] == ["1", "1.000"]
    assert "it fails 1 of 1" in table
    assert "accuracy" not in table


# Honest comparison


def test_reused_tokens_come_from_chunks_alone(engine, tmp_path):
    (question,) = questions(engine, row(), tmp_path=tmp_path)
    methods = {name: make_method(name, engine, 0) for name in ("none", "selective:8")}
    first = [method.first_token(question).reused_share for method in methods.values()]
    for method in methods.values():
        method.answer(question, None)
        method.finish()
    assert [method.first_token(question).reused_share for method in methods.values()] == first
    assert engine.stats.prefix_bytes == 0
    report = engine.generate(question.text, documents=question.documents, max_tokens=1, repair="none").report
    exact = [s.document_id for s in report.spans if s.kind is SpanKind.EXACT]
    assert exact == [None, question.documents[0].id]
    assert report.spans[-1].kind is SpanKind.COMPUTED
    assert report.spans[-1].tokens > len(question.text)


@pytest.mark.parametrize("family", FAMILIES)
def test_baselines_equal_the_model_itself(family, tmp_path):
    with KVBoostEngine(tiny_model(family), tiny_tokenizer()) as engine:
        one, two = questions(engine, row(0), row(1, names=("zebra", "bear")), tmp_path=tmp_path)
        cached = PlainModel(engine.model, kept_prompts=2)
        cached.prefill(token_ids(engine, one, 1)).greedy(5)
        cached.keep()
        ids, earlier = token_ids(engine, two, 1), token_ids(engine, one, 1)
        answer = cached.prefill(ids)
        assert ids[: answer.reused].tolist() == earlier[: answer.reused].tolist()
        assert ids[answer.reused] != earlier[answer.reused]
        assert 60 < answer.reused < len(ids) - 60
        chosen, logits = answer.greedy(8)
        full_chosen, full_logits = PlainModel(engine.model).prefill(ids).greedy(8)
        expected = engine.score(two.text, full_chosen, documents=two.documents, reuse=False).logits
        assert chosen == full_chosen
        assert (full_logits - expected).abs().max() < 1e-4
        assert (logits - expected).abs().max() < 1e-3
        assert (cached.prefill(ids).score(chosen) - expected).abs().max() < 1e-3


def test_prefix_caching_takes_the_longest_of_the_kept_prompts():
    cached = PlainModel(tiny_model("llama"), kept_prompts=2)

    def prefill(*ids: int) -> int:
        return cached.prefill(torch.tensor(ids).numpy()).reused

    assert prefill(1, 2, 3, 4, 5) == 0
    assert prefill(1, 2, 3, 4, 5) == 0  # not kept before the sample is finished
    cached.keep()
    assert prefill(1, 2, 3, 9, 9) == 3
    cached.keep()
    assert prefill(1, 2, 3, 4, 5) == 4  # the last token is always computed
    assert prefill(1, 2, 3, 9, 9, 9) == 5
    assert prefill(1, 2, 7) == 2
    cached.keep()
    assert prefill(1, 2, 3, 4, 5) == 3  # the oldest one is gone


def test_baselines_compute_no_logits_that_nobody_wants():
    model, seen = tiny_model("llama"), []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    try:
        PlainModel(model).prefill(torch.arange(50).numpy())
    finally:
        handle.remove()
    assert seen == [1]


class Recorded(Method):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def first_token(self, question: Question) -> FirstToken:
        self.calls.append(self.name)
        return FirstToken(float(len(self.calls)), None, 0.0, 1)

    def answer(self, question, reference):
        assert (reference is None) == (self.name == "full")
        return Answered((1, 2), torch.zeros(2, 3), self.first_token(question))


def test_the_order_of_methods_turns_with_the_samples(engine):
    turns = []
    for index in range(4):
        calls: list[str] = []
        meter = Meter(engine, {name: Recorded(name, calls) for name in ("full", "b", "c")}, repeats=2)
        question = Question("x", ())
        times = meter._first_tokens(question, index, meter._answers(question, index))
        assert [first.seconds for first in times["full"]][::2] == [1.0, 7.0]
        turns.append(" ".join(calls))
    assert turns == [
        "full b c full b c full", "full b c b c full full", "full c b c full b full", "full b c full b c full"
    ]  # fmt: skip


@pytest.mark.parametrize("reuse", [True, False])
def test_scoring_answers_freely_over_the_same_prefill(engine, tmp_path, reuse):
    (question,) = questions(engine, row(), tmp_path=tmp_path)
    own = engine.generate(
        question.text, documents=question.documents, max_tokens=8, temperature=0.0, ignore_eos=True, reuse=reuse
    ).token_ids
    for given in (own, (*own[:3], 5, 6, 7, 8, 9), (0,) * 8, own[:1]):
        scored = engine.score(question.text, given, documents=question.documents, reuse=reuse, greedy=True)
        assert scored.greedy == own[: len(given)]
        asked = {"documents": question.documents, "reuse": reuse, "greedy": True}
        short = engine.score(question.text, given, **asked, enough=lambda ids: len(ids) > 4).greedy
        assert short == (given if given == own[: len(given)] else own[: max(5, _common(given, own) + 1)])
        with pytest.raises(ValueError, match="pass greedy=True"):
            engine.score(question.text, given, documents=question.documents, reuse=reuse, enough=lambda ids: True)
        alone = engine.score(question.text, given, documents=question.documents, reuse=reuse)
        assert alone.greedy is None
        assert (scored.logits - alone.logits).abs().max() < 1e-5


def _common(a, b):
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


def test_a_free_answer_ends_with_its_first_line(engine, tmp_path):
    """What is read of it is the same as of the whole answer."""
    (question,) = questions(engine, row(), tmp_path=tmp_path)
    tokenizer = engine.tokenizer
    method = make_method("none", engine, 0)
    ids = tokenizer("\n one two\n three", add_special_tokens=False).input_ids
    ends = [n for n in range(len(ids) + 1) if method._has_a_line(ids[:n])]
    assert ends and answer_text(ids[: ends[0]], tokenizer, ()) == answer_text(ids, tokenizer, ()) == "one two"


def test_ttft_ends_before_the_answer_is_scored(engine, tmp_path, monkeypatch):
    (question,) = questions(engine, row(), tmp_path=tmp_path)
    done, elapsed, score = [], Clock.elapsed, ReusingAnswer.score
    monkeypatch.setattr(Clock, "elapsed", lambda self: done.append("clock") or elapsed(self))
    monkeypatch.setattr(ReusingAnswer, "score", lambda self, ids: done.append("score") or score(self, ids))
    engine.score(question.text, [1, 2], documents=question.documents, greedy=True)
    assert done[:2] == ["clock", "score"]


def test_what_auto_stood_for_is_in_the_setup(options, tmp_path):
    Policy((PolicyPoint("selective:3", 0.1, 0.01, 0.01, 1),), "made up").save(tmp_path / "policy.json")
    chosen = options(row(), methods=("full", "auto:standard"), policy=tmp_path / "policy.json")
    setup = run_bench(chosen)["setup"]
    assert setup["policy"] == "made up"
    assert setup["auto"] == {"auto:standard": "auto:standard = selective:3"}
    assert setup["options"]["policy"] == "policy.json"


def test_quantised_kv_is_measured_and_named(options):
    kl = []
    for kv_dtype, sinks in (("native", None), ("int8", 2), ("int4", 0)):
        result = run_bench(options(row(), methods=("full", "none"), kv_dtype=kv_dtype, sink_tokens=sinks))
        assert (result["setup"]["kv_dtype"], result["setup"]["sink_tokens"]) == (kv_dtype, sinks or 0)
        assert (result["setup"]["options"]["kv_dtype"], result["setup"]["options"]["sink_tokens"]) == (kv_dtype, sinks)
        kl.append(result["summary"]["none"]["kl"])
    assert len(set(kl)) == 3
    assert abs(kl[1] - kl[0]) < abs(kl[2] - kl[0])


def test_documents_are_ingested_alone_and_go_when_no_longer_needed(engine, tmp_path, monkeypatch):
    rows = [row(0, ("zebra", "lion")), row(1, ("lion", "bear", "lion")), row(2, ("bear",))]
    samples = read_samples(write(tmp_path / "d.jsonl", *rows))
    added = []
    add = engine.add_documents
    monkeypatch.setattr(engine, "add_documents", lambda documents: added.append(len(documents)) or add(documents))
    meter = Meter(engine, {"full": make_method("full", engine, 0)}, repeats=1)
    kept, ingested = [], []
    for index, sample in enumerate(samples):
        following = samples[index + 1] if index < 2 else None
        ingested.append(meter.measure(sample, index, following)["ingest"])
        kept.append([document.metadata["title"] for document in engine.documents])
    assert added == [1, 1, 1]
    assert kept == [["Lion"], ["Bear"], []]
    assert [i["documents"] for i in ingested] == [2, 1, 0]
    zebra, lion, bear = (len(d.text) for d in (*samples[0].documents, samples[2].documents[0]))
    assert [i["tokens"] for i in ingested] == [zebra + lion, bear, 0]


def test_the_warm_up_leaves_only_the_head(options):
    result = run_bench(options(row(), methods=("full", "prefix-cache")))
    cached = result["samples"][0]["methods"]["prefix-cache"]
    head = len("<|im_start|>user\nDocuments:\n\n") - len("<|im_start|>") + 1
    assert cached["reused_share"] * result["samples"][0]["prompt_tokens"] == pytest.approx(head)


def test_random_repairs_take_the_seed(engine, tmp_path, monkeypatch):
    (question,) = questions(engine, row(), tmp_path=tmp_path)
    asked = []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda *a, **k: asked.append(k["repair"]) or score(*a, **k))
    for name in ("random:0.3", "random:0.3:seed=7", "none"):
        make_method(name, engine, 5).first_token(question)
    assert asked == ["random:0.3:seed=5", "random:0.3:seed=7", "none"]


def test_ingest_rates_leave_nothing_behind(engine, tmp_path):
    samples = read_samples(write(tmp_path / "d.jsonl", row(0), row(1, ("lion", "yak"))))
    rates = ingest_rates(engine, [d for s in samples for d in s.documents])
    assert rates["documents"] == 4
    assert rates["tokens"] == sum(len(text) for text in {d.text for s in samples for d in s.documents})
    assert rates["ratio"] == rates["ingest"] / rates["plain"]
    assert engine.documents == []


def test_instruction_and_context_documents_reach_the_prompt(options, tmp_path):
    (tmp_path / "context.txt").write_text("One paragraph.\n\n  \nAnother\none.\n", encoding="utf-8")
    chosen = options(instruction="Now tell: {question} Short!", context_documents=tmp_path / "context.txt")
    assert chosen.context_texts == ("One paragraph.", "Another\none.")
    with build_engine(chosen) as engine:
        (question,) = questions(engine, row(), tmp_path=tmp_path)
        text = engine.tokenizer.decode(token_ids(engine, question, 1))
        assert "It was fast.\n\nNow tell: What ran, number 0? Short!<|im_end|>" in text
        report = engine.generate(question.text, documents=question.documents, max_tokens=1, repair="none").report
        # Without context documents the first document would be exact.
        assert [s.document_id for s in report.spans if s.kind is SpanKind.EXACT] == [None]
    assert options(context_documents=Path("generic")).context_texts == CONTEXT_TEXTS


# Interruption


@pytest.fixture
def interrupted(options, monkeypatch):
    """Give options whose run was broken off after two of four samples."""
    rows = [row(0), row(1), row(2, ("zebra", "bear")), row(3, ("zebra", "lion"))]
    chosen = options(*rows, methods=("full", "prefix-cache"))
    measure = Meter.measure

    def breaking(self, sample, index, following):
        if index == 2:
            raise KeyboardInterrupt
        return measure(self, sample, index, following)

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "measure", breaking)
        with pytest.raises(KeyboardInterrupt):
            run_bench(chosen)
    return chosen


def partial_of(options: BenchOptions):
    return options.output.with_name("out.json.partial.jsonl")


def count_measured(monkeypatch) -> list[str]:
    measured = []
    measure = Meter.measure
    monkeypatch.setattr(Meter, "measure", lambda self, s, *a: measured.append(s.id) or measure(self, s, *a))
    return measured


def test_an_interrupted_run_goes_on(interrupted, monkeypatch):
    assert not interrupted.output.exists()
    assert len(partial_of(interrupted).read_text(encoding="utf-8").splitlines()) == 3
    measured = count_measured(monkeypatch)
    resumed = run_bench(interrupted)
    assert measured == ["q2", "q3"]
    assert not partial_of(interrupted).exists()
    whole = run_bench(interrupted)

    def shares(result: dict) -> list[float]:
        return [s["methods"]["prefix-cache"]["reused_share"] for s in result["samples"]]

    assert shares(resumed) == shares(whole)
    assert shares(whole)[3] > 0.5  # what the samples before the interruption left


def test_a_finished_part_can_be_looked_at_and_loses_nothing(interrupted, monkeypatch):
    measured = count_measured(monkeypatch)
    for limit in (1, 2):
        result = run_bench(replace(interrupted, limit=limit))
        assert [s["id"] for s in result["samples"]] == ["q0", "q1"][:limit]
        assert result["summary"]["full"]["n"] == result["setup"]["options"]["limit"] == limit
        assert partial_of(interrupted).exists() is (limit == 1)
    assert measured == []


@pytest.mark.parametrize("changes", [{"seed": 3}, {"repeats": 2}, {"methods": ("full",)}])
def test_other_settings_do_not_mix(interrupted, options, changes):
    rows = [json.loads(line) for line in interrupted.data.read_text(encoding="utf-8").splitlines()]
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"other settings \(.*options\.{name}.*\); delete it, or choose another"):
        run_bench(options(*rows, **{"methods": interrupted.methods} | changes))
    assert partial_of(interrupted).exists()


def test_other_data_do_not_mix(interrupted, options):
    with pytest.raises(ValueError, match="data_digest"):
        run_bench(options(row(9), methods=interrupted.methods))


def test_a_torn_last_line_is_measured_again(interrupted, monkeypatch, caplog):
    path = partial_of(interrupted)
    path.write_bytes(path.read_bytes()[:-20])
    measured = count_measured(monkeypatch)
    with caplog.at_level(logging.WARNING, "kvboost_rag.bench"):
        result = run_bench(interrupted)
    assert measured == ["q1", "q2", "q3"]
    assert "ends in the middle of a line" in caplog.text
    assert [s["id"] for s in result["samples"]] == ["q0", "q1", "q2", "q3"]


def test_records_behind_a_torn_line_can_be_read(tmp_path, caplog):
    partial = Partial(tmp_path / "out.json")
    partial.start({"seed": 1}, {"rate": 2})
    path = tmp_path / "out.json.partial.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "torn')
    assert partial.read({"seed": 1}) == ({"rate": 2}, [])
    partial.append({"id": "q", "methods": {}})
    assert partial.read({"seed": 1}) == ({"rate": 2}, [{"id": "q", "methods": {}}])


@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("damaged", ['{"id": "q', "{}", "[]", "\x00"])
def test_a_damaged_line_is_named(tmp_path, line, damaged):
    partial = Partial(tmp_path / "out.json")
    partial.start({"seed": 1}, {})
    partial.append({"id": "q", "methods": {}})
    path = tmp_path / "out.json.partial.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line - 1] = damaged
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"line {line} is damaged; delete the file, or choose another --output"):
        partial.read({"seed": 1})


# Question files


def test_samples_are_read_as_they_stand(tmp_path):
    data = write(tmp_path / "d.jsonl", row(0, choices=["a", "Zebra"]), row(1), row(2))
    data.write_text("\n" + data.read_text(encoding="utf-8"), encoding="utf-8")
    first, second = read_samples(data, 2)
    assert (first.id, first.question, first.answers) == ("q0", "What ran, number 0?", ("zebra",))
    assert first.right_letters == ("B",)
    assert second.choices is None
    assert second.prompt == second.question
    assert first.documents == second.documents
    assert first.documents[0].text == "Zebra\nThe zebra ran over the plain. It was fast."
    assert len({d.id for d in first.documents}) == 3


def test_a_document_without_title_is_its_text(tmp_path):
    documents = [{"text": "Rain."}, {"title": "", "text": "Rain."}]
    (sample,) = read_samples(write(tmp_path / "d.jsonl", row(documents=documents)))
    assert [d.text for d in sample.documents] == ["Rain.", "Rain."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": 3}, "id is 3"),
        ({"question": " "}, "question is ' '"),
        ({"question": None}, "question is missing or null"),
        ({"documents": []}, r"documents is \[\]; write a list that is not empty"),
        ({"documents": ["x"]}, r"documents\[0\] is not an object"),
        ({"documents": [{"title": "x", "text": ""}]}, r"documents\[0\]: text is ''"),
        ({"documents": [{"title": 3, "text": "x"}]}, r"documents\[0\]: title is not a string"),
        ({"answers": "zebra"}, "answers is 'zebra'"),
        ({"answers": [""]}, "answers holds something else than text"),
        ({"choices": ["zebra"]}, "choices holds 1 options"),
        ({"choices": ["horse", "cow"]}, "none of answers is an option"),
        ({"id": "q0"}, "id 'q0' comes twice"),
    ],
)
def test_a_bad_field_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"^d\.jsonl line 2: {message}"):
        read_samples(write(tmp_path / "d.jsonl", row(0), row(1, **changes)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "x"\n', "line 1 is not JSON .*one whole object on each line"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b"\xff\xfe\n", "line 1 is not UTF-8"),
        (b"", "holds no samples"),
        (b"\n \n", "holds no samples"),
    ],
)
def test_a_bad_file_is_named(options, content, message):
    chosen = options()
    chosen.data.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.jsonl {message}"):
        run_bench(chosen)


def sample_of(tmp_path, *documents: tuple[str, str], **changes):
    listed = [{"title": title, "text": text} for title, text in documents]
    return read_samples(write(tmp_path / "d.jsonl", row(documents=listed, **changes)))[0]


def test_documents_that_are_needed_are_kept_in_order(tmp_path):
    documents = [("a", "Nothing."), ("b", "Eyes."), ("Rain Man", "A film."), ("d", "It said yes."), ("e", "Nothing.")]
    sample = sample_of(tmp_path, *documents, question="Is Rain Man long?", answers=["Yes"])
    tokens = Tokens(tiny_tokenizer())
    titles = [[d.metadata["title"] for d in fitted(sample, tokens, n, None).documents] for n in (1, 2, 3, 9)]
    assert titles == [["d"], ["Rain Man", "d"], ["a", "Rain Man", "d"], ["a", "b", "Rain Man", "d", "e"]]


def test_documents_are_cut_at_tokens(tmp_path):
    sample = sample_of(tmp_path, ("T", "short"), ("U", "éclair " * 9))
    short, long = fitted(sample, Tokens(tiny_tokenizer()), None, 10).documents
    assert short is sample.documents[0]
    assert long.text == "U\néclair"  # é is two bytes and so two tokens; the space behind goes
    assert long.id != sample.documents[1].id
    assert long.metadata == {"title": "U"}


def test_prompts_are_filled_with_other_samples_documents(tmp_path):
    file = write(tmp_path / "d.jsonl", *(
        row(id=f"q{n}", documents=[{"title": "", "text": f"{name}{n} {'x' * 17}"} for name in "ab"]) for n in range(4)
    ))  # fmt: skip
    samples, tokens = read_samples(file), Tokens(tiny_tokenizer())  # a token for each character: 20 a document
    assert filled(samples, tokens, None) == samples
    assert filled(samples, tokens, 40) == samples
    both = filled(samples, tokens, 110)
    assert [[d.text[:2] for d in s.documents] for s in both[:2]] == [
        ["a1", "a0", "b1", "a2", "b0", "b2"], ["a2", "a1", "b2", "a3", "b1", "b3"],
    ]  # fmt: skip
    assert [sum(len(tokens.document(d.text)) for d in s.documents) for s in both] == [110] * 4
    assert [d.text[:2] for d in both[3].documents] == ["a0", "a3", "b0", "a1", "b3", "b1"]
    assert len(filled(samples, tokens, 1000)[0].documents) == 8


def test_what_fills_a_prompt_does_not_depend_on_the_limit(options):
    chosen = options(*(row(n, documents=[{"title": "", "text": f"Text {n}. {'x' * 30}"}]) for n in range(4)))
    runs = [run_bench(replace(chosen, fill_tokens=90, limit=limit, methods=("full",))) for limit in (1, None)]
    assert [len(run["samples"]) for run in runs] == [1, 4]
    assert runs[0]["samples"][0]["prompt_tokens"] == runs[1]["samples"][0]["prompt_tokens"] > 90


def test_a_document_comes_once_however_many_samples_have_it(tmp_path):
    shared = {"title": "", "text": "shared"}
    file = write(tmp_path / "d.jsonl", *(
        row(id=f"q{n}", documents=[shared, {"title": "", "text": f"own{n}"}]) for n in range(3)
    ))  # fmt: skip
    texts = [d.text for d in filled(read_samples(file), Tokens(tiny_tokenizer()), 50)[1].documents]
    assert texts == ["shared", "own2", "own1", "own0"]


# Quality


def test_divergence_is_kl_in_nats():
    torch.manual_seed(0)
    p, q = torch.randn(5, 11), torch.randn(5, 11)
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean")
    kl, top1 = divergence(p, q)
    assert kl == pytest.approx(float(expected), rel=1e-5)
    assert top1 == sum(int(a.argmax() == b.argmax()) for a, b in zip(p, q, strict=True)) / 5
    padded = torch.full((5, 2), -torch.inf)
    assert divergence(torch.cat([p, padded], 1), torch.cat([q, padded], 1))[0] == pytest.approx(kl)
    assert divergence(p, p) == (0, 1)


@pytest.mark.parametrize(
    ("answer", "right", "f1", "em"),
    [
        ("The Zebra!", ["zebra"], 1, 1),
        ("a big zebra", ["zebra", "lion"], 2 / 3, 0),
        ("zebra zebra", ["the zebra"], 2 / 3, 0),
        ("lion", ["zebra"], 0, 0),
        ("", ["zebra"], 0, 0),
        ("the", ["a"], 1, 1),
        ("U.S.", ["us"], 1, 1),
    ],
)
def test_squad_metrics(answer, right, f1, em):
    assert token_f1(answer, right) == pytest.approx(f1)
    assert exact_match(answer, right) == em


def test_normalised_keeps_words_that_begin_like_articles():
    assert normalised(" The  theory, an Anode: A-b ") == "theory anode ab"


def test_the_answer_ends_at_the_end_of_text_or_line():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("\n the zebra \nIt ran", add_special_tokens=False).input_ids
    assert answer_text(ids, tokenizer, (257,)) == "the zebra"
    assert answer_text([*ids[:6], 257, *ids[6:]], tokenizer, (257,)) == "the"
    assert answer_text([257, *ids], tokenizer, (257,)) == ""


def test_the_letter_with_the_highest_logit_is_chosen():
    tokenizer, logits = tiny_tokenizer(), torch.zeros(264)
    logits[tokenizer("C", add_special_tokens=False).input_ids[0]] = 1.0
    logits[tokenizer("D", add_special_tokens=False).input_ids[0]] = 2.0
    assert chosen_letter(logits, tokenizer, 4) == "D"
    assert chosen_letter(logits, tokenizer, 3) == "C"


def test_a_tokenizer_without_letters_is_refused():
    def two(text, **options):
        return SimpleNamespace(input_ids=[1, 2])

    with pytest.raises(ValueError, match="no single token for the letter A; leave out samples with choices"):
        chosen_letter(torch.zeros(3), two, 2)


def test_summary():
    def figures(number: float, **changes) -> dict:
        keys = ("ttft_ms", "ttft_ratio", "recomputed_share", "reused_share", "kl", "top1", "exact32", "f1", "em")
        return dict.fromkeys(keys, number) | {"accuracy": None} | changes

    full = [figures(0.0), figures(1.0), figures(1.0, accuracy=0.0), figures(0.0, accuracy=1.0)]
    none = [figures(n, accuracy=f["accuracy"]) for n, f in zip((1.0, 2.0, 3.0, 10.0), full, strict=True)]
    none[0]["recomputed_share"] = None
    records = [
        {"methods": {"full": f, "none": n}, "ingest": {"documents": 1, "tokens": 10, "seconds": 0.5}}
        for f, n in zip(full, none, strict=True)
    ]
    result = summarise(records, ["full", "none"])
    summary = result["summary"]["none"]
    assert result["full_failures"] == 2
    assert result["ingest"] == {"documents": 4, "tokens": 40, "seconds": 2.0}
    assert (summary["n"], summary["ttft_ratio"], summary["ttft_ms"]) == (4, 2.5, 2.5)
    assert (summary["kl"], summary["kl_median"], summary["kl_max"]) == (4.0, 2.5, 10.0)
    assert summary["kl_p95"] == pytest.approx(3 + 0.85 * 7)
    assert summary["recomputed_share"] == 5.0
    assert (summary["f1"], summary["f1_when_full_right"]) == (4.0, 6.0)
    assert (summary["accuracy"], summary["accuracy_when_full_right"]) == (0.5, 1.0)
    mean, lower, upper = summary["f1_difference"]
    assert mean == 3.5 and 1.0 <= lower < mean < upper <= 10.0
    assert result["summary"]["full"]["f1_difference"] == [0.0, 0.0, 0.0]


def test_the_bootstrap_interval_is_that_of_the_mean():
    """Of many normal differences, it is 1.96 standard errors to both sides."""
    rng = np.random.default_rng(1)
    reference, differences = rng.normal(size=400), rng.normal(0.3, 1.0, size=400)
    mean, lower, upper = paired_difference(reference + differences, reference)
    error = 1.96 * differences.std() / 20
    assert mean == pytest.approx(differences.mean())
    assert (mean - lower, upper - mean) == (pytest.approx(error, rel=0.06), pytest.approx(error, rel=0.06))
    assert paired_difference(reference + differences, reference) == (mean, lower, upper)


# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "limit is 0; pass a whole number of at least 1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"max_documents": -1}, "max_documents is -1"),
        ({"max_document_tokens": 0}, "max_document_tokens is 0"),
        ({"fill_tokens": 0}, "fill_tokens is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"methods": ("full", "magic:3")}, "'magic:3' is neither one of full, prefix-cache, joint nor a repair"),
        ({"methods": ("full", "none", "none")}, "methods hold none more than once"),
        ({"methods": ("none",)}, "methods must hold full"),
        ({"instruction": "Answer!"}, "instruction must hold {question}"),
        ({"layout": "poem"}, "pass one of completion, chat"),
        ({"dtype": "int8"}, "dtype is 'int8'; pass one of float32"),
        ({"kv_dtype": "int2"}, "kv_dtype is 'int2'; pass one of native, int8"),
        ({"sink_tokens": 4}, "sink_tokens has no use with kv_dtype='native'"),
        ({"kv_dtype": "int8", "sink_tokens": -4}, "sink_tokens is -4"),
    ],
)
def test_bad_options(options, changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_bad_paths(tmp_path):
    data = write(tmp_path / "d.jsonl", row())
    with pytest.raises(ValueError, match=r"data .*missing\.jsonl is not a file"):
        BenchOptions(data=tmp_path / "missing.jsonl", output=tmp_path / "o.json")
    with pytest.raises(ValueError, match="the folder of output .* does not exist; make it"):
        BenchOptions(data=data, output=tmp_path / "none" / "o.json")
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        BenchOptions(data=data, output=tmp_path)
    with pytest.raises(ValueError, match="context_documents .* is not a file"):
        BenchOptions(data=data, output=tmp_path / "o.json", context_documents=tmp_path / "c.txt")
    (tmp_path / "c.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no text; leave the option out"):
        _ = BenchOptions(data=data, output=tmp_path / "o.json", context_documents=tmp_path / "c.txt").context_texts


def parsed(*arguments: str) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert "--max-document-tokens" in parser.format_help()
    return options_from(parser.parse_args(arguments))


def test_arguments(tmp_path):
    data = write(tmp_path / "d.jsonl", row())
    paths = {"data": data, "output": tmp_path / "o.json"}
    needed = [f"--{name}={path}" for name, path in paths.items()]
    assert parsed(*needed) == BenchOptions(**paths)
    extra = "--methods|full, selective:8+cacheblend:0.15:deviation=keys|--limit|3|--max-documents|2|--repeats|4"
    extra += "|--max-document-tokens|9|--fill-tokens|90|--seed|5|--threads|1|--dtype|bfloat16|--model|m|--device|cpu"
    extra += "|--kv-dtype|int8/int4|--sink-tokens|3"
    assert parsed(*needed, *extra.split("|")) == BenchOptions(
        **paths, methods=("full", "selective:8+cacheblend:0.15:deviation=keys"), limit=3, max_documents=2, repeats=4,
        max_document_tokens=9, fill_tokens=90, seed=5, threads=1, dtype="bfloat16", model="m", device="cpu",
        kv_dtype="int8/int4", sink_tokens=3,
    )  # fmt: skip
    assert BenchOptions(**paths, dtype="bfloat16").torch_dtype is torch.bfloat16
    assert parsed(*needed, "--layout", "chat").prompt_layout == CHAT
    assert parsed(*needed).prompt_layout == COMPLETION
    assert parsed(*needed, "--instruction", "Now: {question}").prompt_layout.question == "\n\nNow: {question}"
    assert ANSWER_TOKENS == 32
