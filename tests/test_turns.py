"""Whose turn it is: requests and batches alternate, nobody is waited for in vain, nobody is left behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvboost_rag.batching import Turns


def until(condition: Callable[[], object]) -> None:
    """Wait for what other threads are about to do."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Interrupted(BaseException):
    """As a signal raises KeyboardInterrupt, at any place."""


class Log:
    """What a model would have run, in order."""

    def __init__(self, most: int) -> None:
        self.events: list[object] = []
        self.turns: Turns[str, str] = Turns(self.run, most)

    def run(self, works):
        self.events.append(list(works))
        return [work.upper() for work in works]

    def open(self, name):
        with self.turns.opening():
            self.events.append(name)

    def queued(self) -> int:
        return len(self.turns._steps) + len(self.turns._openings)

    def all_at_once(self, pool, *calls):
        """Have calls wait in this order, then let them go."""
        with self.turns.opening():
            futures = []
            for i, (call, *arguments) in enumerate(calls):
                futures.append(pool.submit(call, *arguments))
                until(lambda wanted=i + 1: self.queued() == wanted)
        return futures

    def is_idle(self) -> bool:
        return not self.queued() and not self.turns._busy


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def patient(monkeypatch):
    """Let a batch wait as good as for ever for those of the latest one."""
    monkeypatch.setattr("kvboost_rag.batching.LEAST_GRACE", 300.0)


def test_steps_that_wait_run_together_and_each_gets_its_own(pool):
    log = Log(4)
    futures = log.all_at_once(pool, *((log.turns.step, name, name) for name in "abc"))
    assert [future.result(60) for future in futures] == ["A", "B", "C"]
    assert log.events == [["a", "b", "c"]]


def test_requests_and_batches_alternate(pool):
    log = Log(2)
    calls = [(log.open, "one"), (log.open, "two"), (log.open, "three")]
    calls += [(log.turns.step, name, name) for name in "abcde"]
    for future in log.all_at_once(pool, *calls):
        future.result(60)
    # The model was held by a request, so that steps come first; the others come back too late for a second one.
    assert log.events[:6] == [["a", "b"], "one", ["c", "d"], "two", ["e"], "three"]


def test_more_streams_than_a_batch_holds_come_in_turn(pool):
    log, handed_in = Log(2), []

    class Queue(deque):
        def append(self, step):
            handed_in.append(step.work)
            super().append(step)

    def stream(name):
        for _ in range(4):
            log.turns.step(name, name)

    log.turns._steps = Queue()
    for future in log.all_at_once(pool, *((stream, name) for name in "abcde")):
        future.result(60)
    assert max(len(batch) for batch in log.events) == 2
    assert [name for batch in log.events for name in batch] == handed_in
    assert sorted(handed_in) == sorted("abcde" * 4)


def test_a_batch_waits_for_the_streams_of_the_latest_one(pool, patient):
    log = Log(4)

    def stream(name, steps):
        for i in range(steps):
            assert log.turns.step(name, f"{name}{i}") == f"{name}{i}".upper()
        log.turns.leave(name)

    for future in log.all_at_once(pool, (stream, "a", 9), (stream, "b", 5), (stream, "c", 7)):
        future.result(60)
    assert [len(batch) for batch in log.events] == [3] * 5 + [2] * 2 + [1] * 2


def test_a_stream_that_does_not_come_back_is_not_waited_for(pool):
    log = Log(4)
    for future in log.all_at_once(pool, (log.turns.step, "a", "a"), (log.turns.step, "slow", "slow")):
        future.result(60)
    assert [pool.submit(log.turns.step, "a", f"a{i}").result(60) for i in range(3)] == ["A0", "A1", "A2"]
    assert log.turns.step("slow", "late") == "LATE"
    assert log.events == [["a", "slow"], ["a0"], ["a1"], ["a2"], ["late"]]


def test_a_stream_alone_waits_for_nobody(patient):
    log = Log(4)
    assert [log.turns.step("a", f"a{i}") for i in range(3)] == ["A0", "A1", "A2"]


def test_an_exception_in_the_place_of_a_result_reaches_its_stream_alone(pool):
    log = Log(4)
    log.turns._run = lambda works: [ValueError(work) if work == "bad" else work for work in works]
    good, bad = log.all_at_once(pool, (log.turns.step, "g", "good"), (log.turns.step, "b", "bad"))
    assert good.result(60) == "good"
    with pytest.raises(ValueError, match="bad"):
        bad.result(60)
    assert log.turns.step("g", "good") == "good"
    assert log.is_idle()


def test_an_exception_of_the_run_leaves_nobody_waiting(pool):
    log = Log(4)
    log.turns._run = lambda works: 1 / 0
    for future in log.all_at_once(pool, (log.turns.step, "a", "a"), (log.turns.step, "b", "b")):
        with pytest.raises(ZeroDivisionError):
            future.result(60)
    assert log.is_idle()


def test_when_the_thread_that_runs_a_batch_is_interrupted_the_others_run_it(pool):
    log, interrupted = Log(4), []

    def run(works):
        if not interrupted:
            interrupted.append(list(works))
            raise Interrupted
        return log.run(works)

    log.turns._run = run
    futures = log.all_at_once(pool, *((log.turns.step, name, name) for name in "abc"))
    errors = [future.exception(60) for future in futures]
    (leader,) = [name for name, error in zip("abc", errors, strict=True) if isinstance(error, Interrupted)]
    assert interrupted == [["a", "b", "c"]]
    assert log.events == [[name for name in "abc" if name != leader]]
    assert sum(error is None for error in errors) == 2
    assert log.is_idle()


@pytest.mark.parametrize("kind", ["opening", "step"])
def test_a_thread_that_is_interrupted_while_it_waits_is_forgotten(pool, kind):
    log = Log(4)
    original, mine = log.turns._changed.wait, []

    def wait(timeout=None):
        if threading.get_ident() in mine:
            raise Interrupted
        return original(timeout)

    def interrupted():
        mine.append(threading.get_ident())
        log.open("never") if kind == "opening" else log.turns.step("never", "never")

    log.turns._changed.wait = wait
    with log.turns.opening(), pytest.raises(Interrupted):
        pool.submit(interrupted).result(60)
    assert log.is_idle()
    log.open("next")
    assert log.turns.step("a", "a") == "A"
    assert log.events == ["next", ["a"]]


def test_a_step_that_two_interruptions_hit_holds_nobody_up(pool):
    """Its own thread's while it waits for the result, and that of the thread that runs the batch."""
    log, running, go = Log(4), threading.Event(), threading.Event()
    original, waiting = log.turns._changed.wait, []

    def wait(timeout=None):
        waiting.append(threading.get_ident())
        if running.is_set() and not go.is_set():
            go.set()
            raise Interrupted
        return original(timeout)

    def run(works):
        running.set()
        with log.turns._changed:
            log.turns._changed.notify_all()
        assert go.wait(60)
        raise Interrupted

    log.turns._changed.wait, log.turns._run = wait, run
    futures = log.all_at_once(pool, *((log.turns.step, name, name) for name in "ab"))
    assert [type(future.exception(60)) for future in futures] == [Interrupted] * 2
    log.turns._changed.wait = original
    assert log.is_idle()
    log.open("next")


def test_a_failed_request_lets_the_others_have_the_model(pool):
    log = Log(2)

    def fail():
        with log.turns.opening():
            raise RuntimeError("prefill")

    failed, fine, step = log.all_at_once(pool, (fail,), (log.open, "fine"), (log.turns.step, "a", "a"))
    with pytest.raises(RuntimeError, match="prefill"):
        failed.result(60)
    fine.result(60)
    assert step.result(60) == "A"
    assert log.is_idle()


def test_leaving_never_waits_even_inside_the_lock():
    log = Log(2)
    log.turns.step("a", "a")
    with log.turns._changed:
        log.turns.leave("a")
    assert not log.turns._missing
