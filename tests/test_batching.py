"""Streams of several threads share their decode forwards: the serial text, and nobody pays for anybody else."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adapted import adapted
from test_turns import until
from tiny import CORE, FAMILIES, WINDOW, tiny_model, tiny_tokenizer
from transformers import AttentionInterface, LogitsProcessor

from kvboost_rag import Document, EngineClosedError, KVBoostEngine, ModelChangedError, ModelOutputError
from kvboost_rag.model import Row, can_share, check_support, forward_rows

DOCUMENTS = [
    Document("zebra", "The zebra ran over the plain. It was fast and striped, and it saw a lion. Then it ran home."),
    Document("music", "A fugue begins with one voice alone. Others join, one by one, each with the same theme."),
]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
BAD = 9


def make_engine(model=None, **options) -> KVBoostEngine:
    options = {"max_batch": 4, "max_prefix_bytes": 0, "repair": "sensitive:0.1", **options}
    engine = KVBoostEngine(tiny_model("llama") if model is None else model, tiny_tokenizer(), **options)
    engine.add_documents(DOCUMENTS)
    return engine


@pytest.fixture
def engine():
    with make_engine() as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let a batch wait as good as for ever for those of the latest one, so that nothing depends on the time."""
    monkeypatch.setattr("kvboost_rag.batching.LEAST_GRACE", 300.0)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("kvboost_rag.batching.LEAST_GRACE", 0.01)


def requests(*changes: dict) -> list[dict]:
    """Different questions over the documents in different orders."""
    orders = [["zebra", "music"], ["music", "zebra"], ["music"], []]
    return [
        {"prompt": f"Question {i}: {'why? ' * i}", "documents": orders[i % 4], "max_tokens": 12, **GREEDY, **change}
        for i, change in enumerate(changes)
    ]


def batch_sizes(engine) -> list[int]:
    """Sizes of the batches that run from now on."""
    sizes, original = [], engine._turns._run
    engine._turns._run = lambda steps: (sizes.append(len(steps)), original(steps))[1]
    return sizes


def drained(stream):
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


def together(engine, asked: list[dict], consume: Callable = lambda i, stream: drained(stream)) -> list[object]:
    """Results or exceptions of requests that are all at their second token before the first batch runs."""
    met = threading.Barrier(len(asked) + 1)

    def run(i):
        stream = engine.stream(**asked[i])
        next(stream)
        met.wait(60)
        try:
            return consume(i, stream)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(run, i) for i in range(len(asked))]
        until(lambda: met.n_waiting == len(asked))
        with engine._turns.opening():
            met.wait(60)
            until(lambda: len(engine._turns._steps) == len(asked))
        return [future.result(120) for future in futures]


def is_idle(engine) -> bool:
    turns = engine._turns
    return not (turns._steps or turns._openings or turns._busy)


class Force(LogitsProcessor):
    """Chooses one token at one place of the answer."""

    def __init__(self, token_id: int, at: int) -> None:
        self.token_id, self.left = token_id, at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            scores = torch.full_like(scores, -1e9)
            scores[:, self.token_id] = 0.0
        return scores


# One forward ---------------------------------------------------------------------------------------------------------


def encoded(runner, lengths) -> list[Row]:
    rows = []
    for length in lengths:
        cache, slots = runner.new_cache(length + 9), torch.arange(length)
        cache.keys.fill_(5.0), cache.values.fill_(5.0)
        runner.forward(slots * 7 % 250, slots, cache, length)
        rows.append(Row(7, length, cache))
    return rows


@pytest.mark.parametrize(
    ("family", "implementation"), [*((family, None) for family in FAMILIES), *((family, "eager") for family in CORE)]
)
def test_rows_in_one_forward_get_the_logits_and_the_text_of_rows_by_themselves(family, implementation):
    runner = check_support(tiny_model(family, 0, implementation))
    assert can_share(runner)
    # Over the window, at its edge from both sides, and a short one.
    lengths = (WINDOW + 30, WINDOW - 4, WINDOW, 3)
    alone, shared = encoded(runner, lengths), encoded(runner, lengths)
    for _ in range(8):
        expected = torch.stack([forward_rows(runner, [row])[0] for row in alone])
        got = torch.stack(forward_rows(runner, shared))
        assert (got - expected).abs().max() < 1e-4
        chosen = expected.argmax(dim=-1).tolist()
        assert got.argmax(dim=-1).tolist() == chosen
        alone, shared = (
            [Row(token, row.position + 1, row.cache) for token, row in zip(chosen, rows, strict=True)]
            for rows in (alone, shared)
        )
    for one, other in zip(alone, shared, strict=True):
        assert (one.cache.keys - other.cache.keys).abs().max() < 1e-4
        assert (one.cache.values - other.cache.values).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "mixtral", "longrope"])
def test_threads_give_the_serial_text(family):
    with make_engine(tiny_model(family)) as engine:
        asked = requests({}, {}, {})
        serial = [engine.generate(**request).token_ids for request in asked]
        sizes = batch_sizes(engine)
        assert [result.token_ids for result in together(engine, asked)] == serial
        assert sizes == [3] * 11


def _needs_a_mask(module, query, key, value, attention_mask, scaling=None, **kwargs):
    groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
    if attention_mask is None and tokens < key.shape[2]:
        raise ValueError("no mask")
    if attention_mask is None:
        attention_mask = torch.full((tokens, tokens), -1e9).triu(1)
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling + attention_mask
    return (scores.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def test_a_model_whose_attention_can_not_share_runs_step_after_step_and_says_so_once(caplog):
    AttentionInterface.register("needs_a_mask", _needs_a_mask)
    model = tiny_model("llama", 0, "needs_a_mask")
    with make_engine(model) as engine, caplog.at_level(logging.WARNING, "kvboost_rag"):
        asked = requests({}, {}, {})
        serial = [engine.generate(**request).token_ids for request in asked]
        for _ in range(2):
            assert [result.token_ids for result in together(engine, asked)] == serial
    assert caplog.text.count("LlamaForCausalLM run one after another") == 1


# Answers of every kind -----------------------------------------------------------------------------------------------


def test_answers_of_different_lengths_and_samplings_are_the_serial_ones(engine):
    sampled = {"temperature": 1.5, "top_p": 0.9, "seed": 5}
    asked = requests(
        {"max_tokens": 3}, sampled, {"temperature": 1.0, "seed": 6, "max_tokens": 30, "repetition_penalty": 1.3},
        {"reuse": False}, {"ignore_eos": False, "stop": "e", "max_tokens": 20},
    )  # fmt: skip
    serial = [engine.generate(**request) for request in asked]
    assert len({result.token_ids for result in serial}) == 5
    got = together(engine, asked)
    assert [(r.text, r.token_ids, r.finish_reason) for r in got] == [
        (r.text, r.token_ids, r.finish_reason) for r in serial
    ]
    assert is_idle(engine)


def test_requests_that_come_while_others_answer_give_the_serial_text(engine, impatient):
    asked = requests(*[{"max_tokens": 24}] * 7)
    serial = [engine.generate(**request).token_ids for request in asked]
    first = engine.stream(**asked[0])
    sizes = batch_sizes(engine)
    with ThreadPoolExecutor(6) as pool:
        futures = []
        for i, request in enumerate(asked[1:]):
            next(first)
            futures.append(pool.submit(engine.generate, **request))
            # Some start alone, some while others are under way.
            if i % 2:
                futures[-1].result(120)
        assert [future.result(120).token_ids for future in futures] == serial[1:]
    assert drained(first).token_ids == serial[0]
    assert sum(sizes) == 7 * 23
    assert max(sizes) <= 4
    assert is_idle(engine)


def test_scores_and_documents_do_not_wait_for_answers_to_end(engine, impatient):
    stop = threading.Event()

    def stream():
        for delta in engine.stream("Why?", max_tokens=900, **GREEDY):
            if stop.is_set():
                return delta

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(stream) for _ in range(2)]
        engine.score("Why?", [1, 2], documents=["music"], greedy=True)
        engine.deviation("Why?", documents=["zebra", "music"])
        engine.add_documents([Document("new", "A new text that nobody has seen.")])
        engine.remove_documents(["new"])
        stop.set()
        for future in running:
            future.result(60)


# What goes wrong with one --------------------------------------------------------------------------------------------


def test_a_closed_stream_leaves_nothing_behind(engine, impatient):
    asked = requests({"max_tokens": 24}, {}, {})
    serial = [engine.generate(**request).token_ids for request in asked]
    held = []

    def consume(i, stream):
        if i:
            return drained(stream).token_ids
        held.append(weakref.ref(stream.gi_frame.f_locals["session"].cache))
        next(stream)
        return stream.close()

    assert together(engine, asked, consume) == [None, *serial[1:]]
    assert is_idle(engine)
    engine.generate("And?", max_tokens=1)
    gc.collect()
    assert held[0]() is None


def test_a_stream_that_nobody_reads_holds_nobody_up(engine, impatient):
    asked = requests({"max_tokens": 24}, {})
    serial = [engine.generate(**request).token_ids for request in asked]
    others_are_done = threading.Event()

    def consume(i, stream):
        if i:
            result = drained(stream)
            others_are_done.set()
            return result.token_ids
        next(stream)
        assert others_are_done.wait(60)
        return drained(stream).token_ids

    assert together(engine, asked, consume) == serial


@pytest.mark.parametrize("kind", ["nan", "error", "processor"])
def test_what_is_wrong_with_one_answer_is_its_own_alone(engine, kind, caplog):
    asked = requests({}, {}, {})
    serial = [engine.generate(**request).token_ids for request in asked]
    assert not any(BAD in ids for ids in serial)

    def spoil(module, args, out):
        ids = args[0]
        if kind == "error" and bool((ids == BAD).any()):
            raise RuntimeError("this token can not be run")
        return out.masked_fill((ids == BAD)[..., None], torch.nan)

    # A grammar that has come to its end raises in the processor.
    asked[1]["logits_processor"] = [Force(BAD if kind != "processor" else 10**6, at=4)]
    hook = engine.model.get_input_embeddings().register_forward_hook(spoil)
    sizes = batch_sizes(engine)
    try:
        with caplog.at_level(logging.WARNING, "kvboost_rag"):
            got = together(engine, asked)
    finally:
        hook.remove()
    error = {"nan": ModelOutputError, "error": RuntimeError, "processor": IndexError}[kind]
    assert type(got[1]) is error
    assert [got[0].token_ids, got[2].token_ids] == [serial[0], serial[2]]
    assert sizes[:3] == [3] * 3
    assert sizes[-1] == 2
    assert ("a forward of 3 answers failed" in caplog.text) == (kind == "error")
    assert is_idle(engine)
    assert engine.generate(**requests({})[0]).token_ids == serial[0]


def test_a_timeout_is_its_own_streams_alone(engine):
    asked = requests({}, {"timeout": 1000.0}, {})
    serial = [engine.generate(**request).token_ids for request in asked]
    original, batches = engine._turns._run, []

    def late(steps):
        batches.append(len(steps))
        if len(batches) == 5:
            (clock,) = [clock for _, _, clock in steps if clock._timeout]
            clock._start -= 2000
        return original(steps)

    engine._turns._run = late
    got = together(engine, asked)
    assert isinstance(got[1], TimeoutError)
    assert [got[0].token_ids, got[2].token_ids] == [serial[0], serial[2]]
    assert batches == [3] * 5 + [2] * 6


def test_closing_the_engine_ends_all_streams(engine):
    sizes = batch_sizes(engine)

    def consume(i, stream):
        if i == 0:
            for _ in range(5):
                next(stream)
            threading.Thread(target=engine.close).start()
        return drained(stream)

    got = together(engine, requests(*[{"max_tokens": 500}] * 3), consume)
    assert [type(error) for error in got] == [EngineClosedError] * 3
    assert len(sizes) < 499
    assert is_idle(engine)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_switched_adapter_ends_the_answers_of_the_other_one():
    model = adapted("x", "y")
    with make_engine(model) as engine:
        asked = requests({"max_tokens": 12}, {"max_tokens": 12})
        serial = [engine.generate(**request).token_ids for request in asked]
        sizes = batch_sizes(engine)
        assert [result.token_ids for result in together(engine, asked)] == serial
        assert sizes == [2] * 11

        def switched(steps, original=engine._turns._run):
            if len(sizes) == 14:
                model.set_adapter("y")
            return original(steps)

        engine._turns._run = switched
        assert [type(error) for error in together(engine, asked)] == [ModelChangedError] * 2


# Options -------------------------------------------------------------------------------------------------------------


def test_one_at_a_time_is_the_default():
    with make_engine(max_batch=1) as engine:
        assert engine._turns is None
        assert engine.generate("Why?", max_tokens=2, **GREEDY).token_ids


@pytest.mark.parametrize("number", [0, -1, 2.5, "4"])
def test_a_max_batch_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match="pass 1 or more"):
        make_engine(max_batch=number)


def test_max_batch_without_reuse_is_refused():
    with pytest.raises(ValueError, match="^max_batch: no use with reuse='off'"):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="off", max_batch=2)


@pytest.mark.real
def test_the_small_model_gives_the_serial_text(smollm2):
    with KVBoostEngine(*smollm2, max_batch=3, max_prefix_bytes=0) as engine:
        engine.add_documents(DOCUMENTS)
        asked = requests(*[{"max_tokens": 6}] * 3)
        serial = [engine.generate(**request).token_ids for request in asked]
        sizes = batch_sizes(engine)
        got = together(engine, asked)
        assert [result.token_ids for result in got] == serial
        assert sizes == [3] * 5
