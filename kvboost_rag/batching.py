"""Whose turn it is with the model when several threads want it: new requests one at a time, decode steps together.

Continuous batching, as in Orca (https://www.usenix.org/conference/osdi22/presentation/yu): who takes part is decided
anew for every step, so answers come and go while others are under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Turns"]

Work = TypeVar("Work")
Out = TypeVar("Out")

LEAST_GRACE = 0.005
"""Seconds; choosing a token takes about a tenth of it for each stream."""

GRACE_SHARE = 0.25
"""Of the latest batch's seconds: what one that does not come back costs the others, once."""


@dataclass(eq=False)
class _Step(Generic[Work, Out]):
    """One stream's wait for its next step; the outcome is a result or what to raise."""

    stream: Hashable
    work: Work
    outcome: Out | BaseException | None = None


class Turns(Generic[Work, Out]):
    """Lets threads take turns with a model.

    A new request (an opening) and a batch of steps alternate while both are waiting: no flood of requests holds up the
    answers under way for longer than one prefill, and no answers hold up a request for longer than one batch. Both
    queues are first come, first served.

    A batch starts when all streams of the latest one have come back with their next token, or after a short grace: 5
    milliseconds, or a quarter of the time that the latest batch took, if that is more. So threads that choose their
    tokens at the same time end up in the same batch, and a stream whose consumer is slow is not waited for.

    Parameters
    ----------
    run
        Runs the steps of one batch, and returns for each its result or the exception that only its stream shall see.
        Called by one of the waiting threads, never by two at a time.
    most
        Steps in a batch, at least 1.
    """

    def __init__(self, run: Callable[[Sequence[Work]], Sequence[Out | Exception]], most: int) -> None:
        self._run = run
        self._most = most
        # No reentrant lock, so that a finalizer never gets into the middle of anything.
        self._changed = threading.Condition(threading.Lock())
        self._steps: deque[_Step[Work, Out]] = deque()
        self._openings: deque[object] = deque()
        self._busy = False
        self._opened_last = False
        # Streams of the latest batch that have not come back, and how long they are waited for.
        self._missing: set[Hashable] = set()
        self._deadline = 0.0

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Wait for the turn of a new request, and have the model alone."""
        mine = object()
        with self._changed:
            self._openings.append(mine)
            try:
                self._changed.wait_for(lambda: self._may_open(mine))
                self._busy = self._opened_last = True
            finally:
                self._openings.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            self._release()

    def step(self, stream: Hashable, work: Work) -> Out:
        """Run one stream's next step, together with those of others that are waiting.

        Parameters
        ----------
        stream
            Tells the streams apart; each has one step at a time.
        work
            What ``run`` gets.

        Raises
        ------
        BaseException
            What ``run`` returned in the place of a result, or raised.
        """
        mine: _Step[Work, Out] = _Step(stream, work)
        with self._changed:
            self._steps.append(mine)
            self._missing.discard(stream)
            # Anybody else would wake up in vain.
            if not self._grace_left():
                self._changed.notify_all()
        while mine.outcome is None:
            if batch := self._wait(mine):
                self._lead(mine, batch)
        if isinstance(mine.outcome, BaseException):
            raise mine.outcome
        return mine.outcome

    def leave(self, stream: Hashable) -> None:
        """Say that a stream has come to its end, so that nobody waits for it; safe in a finalizer."""
        self._missing.discard(stream)
        # A finalizer may run while this very thread holds the lock; then the grace ends the wait.
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    def _may_open(self, mine: object) -> bool:
        return not self._busy and self._openings[0] is mine and not (self._steps and self._opened_last)

    def _grace_left(self) -> float:
        """Seconds for which streams of the latest batch are still waited for."""
        if not self._missing or len(self._steps) >= self._most:
            return 0.0
        return max(0.0, self._deadline - time.monotonic())

    def _wait(self, mine: _Step[Work, Out]) -> list[_Step[Work, Out]]:
        """Wait until another thread has run a step, or this one is to run a batch, which is returned."""
        with self._changed:
            try:
                while mine.outcome is None:
                    left = self._grace_left()
                    may_run = not self._busy and not (self._openings and not self._opened_last)
                    if may_run and not left and mine in islice(self._steps, self._most):
                        return self._take()
                    self._changed.wait(left or None)
            except BaseException as interrupted:
                # If the step is in a batch already, nobody asks for its result.
                mine.outcome = interrupted
                if mine in self._steps:
                    self._steps.remove(mine)
                self._changed.notify_all()
                raise
        return []

    def _take(self) -> list[_Step[Work, Out]]:
        self._busy, self._opened_last = True, False
        return [self._steps.popleft() for _ in range(min(self._most, len(self._steps)))]

    def _lead(self, mine: _Step[Work, Out], batch: list[_Step[Work, Out]]) -> None:
        """Run a batch for all of its threads."""
        start = time.monotonic()
        outcomes: Sequence[Out | BaseException | None] = [None] * len(batch)
        try:
            outcomes = self._run([step.work for step in batch])
        except Exception as error:
            outcomes = [error] * len(batch)
        finally:
            with self._changed:
                self._hand_out(mine, batch, outcomes)
            self._release(time.monotonic() - start)

    def _hand_out(
        self, mine: _Step[Work, Out], batch: list[_Step[Work, Out]], outcomes: Sequence[Out | BaseException | None]
    ) -> None:
        for step, outcome in zip(batch, outcomes, strict=True):
            if step.outcome is None:
                step.outcome = outcome
        # If this thread was interrupted, the others' steps are still to be run.
        self._steps.extendleft(step for step in reversed(batch) if step.outcome is None and step is not mine)
        self._missing = {step.stream for step in batch if not isinstance(step.outcome, BaseException)}
        self._missing -= {step.stream for step in self._steps}

    def _release(self, seconds: float = 0.0) -> None:
        """Let the others have the model, after a batch that took so long."""
        with self._changed:
            self._busy = False
            if seconds:
                self._deadline = time.monotonic() + max(LEAST_GRACE, GRACE_SHARE * seconds)
            self._changed.notify_all()
