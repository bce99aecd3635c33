"""All figures of one sample."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor

from kvboost_rag.bench.data import Sample
from kvboost_rag.bench.methods import Answered, FirstToken, Method, Question
from kvboost_rag.bench.quality import answer_text, chosen_letter, divergence, exact_match, token_f1
from kvboost_rag.decode.processors import eos_ids
from kvboost_rag.engine import KVBoostEngine

__all__ = ["Meter"]


class Meter:
    """Measures samples one after the other and keeps no more documents than the next one needs.

    Parameters
    ----------
    engine
        Holds the documents.
    methods
        By name; ``full`` among them.
    repeats
        TTFT measurements of each method.
    """

    def __init__(self, engine: KVBoostEngine, methods: Mapping[str, Method], repeats: int) -> None:
        self._engine = engine
        self._methods = methods
        self._repeats = repeats
        self._eos = eos_ids(engine.model.generation_config, engine.tokenizer)

    def warm_up(self, sample: Sample, question: Question) -> None:
        """Run every method once on a prompt as long as the sample's that shares only the head with it."""
        self._ingest(question)
        for method in self._methods.values():
            method.first_token(question)
            method.finish()
        self._drop_all_but(sample)

    def recall(self, samples: Sequence[Sample]) -> None:
        """Put methods into the state that these samples, measured before an interruption, left them in."""
        for sample in samples:
            for method in self._methods.values():
                method.recall(Question(sample.prompt, sample.documents))

    def measure(self, sample: Sample, index: int, following: Sample | None) -> dict[str, Any]:
        """Measure one sample.

        Parameters
        ----------
        sample
            Its documents are ingested one by one unless they are known already.
        index
            Its place in the file, which decides which method's TTFT is measured first.
        following
            The next sample; documents that it does not share are removed.

        Returns
        -------
        dict[str, Any]
            ``id``, ``prompt_tokens``, ``documents``, ``ingest`` and the figures of ``methods``, as JSON can hold it.
        """
        question = Question(sample.prompt, sample.documents)
        ingest = self._ingest(question)
        answers = self._answers(question, index)
        times = self._first_tokens(question, index, answers)
        figures = self._figures(sample, answers, times)
        for method in self._methods.values():
            method.finish()
        self._drop_all_but(following)
        return {
            "id": sample.id,
            "prompt_tokens": times["full"][0].prompt_tokens,
            "documents": len(sample.documents),
            "ingest": ingest,
            "methods": figures,
        }

    def _ingest(self, question: Question) -> dict[str, Any]:
        """Add each unknown document alone."""
        known = {document.id for document in self._engine.documents}
        missing = {d.id: d for d in question.documents if d.id not in known}
        before, start = self._engine.stats.document_tokens, time.perf_counter()
        for document in missing.values():
            self._engine.add_documents([document])
        seconds = time.perf_counter() - start
        tokens = self._engine.stats.document_tokens - before
        return {"documents": len(missing), "tokens": tokens, "seconds": seconds}

    def _drop_all_but(self, following: Sample | None) -> None:
        kept = {document.id for document in following.documents} if following else set()
        self._engine.remove_documents([d.id for d in self._engine.documents if d.id not in kept])

    def _answers(self, question: Question, index: int) -> dict[str, Answered]:
        """Let every method answer, full prefill first because the others are compared with its answer."""
        answers = {"full": self._methods["full"].answer(question, None)}
        for name in self._in_turn(index):
            if name != "full":
                answers[name] = self._methods[name].answer(question, answers["full"].token_ids)
        return answers

    def _first_tokens(
        self, question: Question, index: int, answers: Mapping[str, Answered]
    ) -> dict[str, list[FirstToken]]:
        """Collect the answers' TTFT and measure more, full prefill's once more than the others'.

        The machine may slow down or speed up in between; full prefill is measured before and after all others.
        """
        times = {name: [answered.first] for name, answered in answers.items()}
        for _ in range(self._repeats - 1):
            for name in self._in_turn(index):
                times[name].append(self._methods[name].first_token(question))
        times["full"].append(self._methods["full"].first_token(question))
        return times

    def _in_turn(self, index: int) -> list[str]:
        """Name the methods in another order for each sample, so that none always follows the same one."""
        names = list(self._methods)
        turn = index % len(names)
        return names[turn:] + names[:turn]

    def _figures(
        self, sample: Sample, answers: Mapping[str, Answered], times: Mapping[str, Sequence[FirstToken]]
    ) -> dict[str, Any]:
        reference = answers["full"]
        full_seconds = _seconds(times["full"])
        return {
            name: {
                "ttft_ms": 1000 * _seconds(times[name]),
                "ttft_ratio": _seconds(times[name]) / full_seconds,
                "recomputed_share": times[name][0].recomputed_share,
                "reused_share": times[name][0].reused_share,
                **self._likeness(reference, answered),
                **self._rightness(sample, answered.token_ids, answered.logits[0]),
            }
            for name, answered in answers.items()
        }

    @staticmethod
    def _likeness(reference: Answered, answered: Answered) -> dict[str, float]:
        kl, top1 = divergence(reference.logits, answered.logits)
        return {"kl": kl, "top1": top1, "exact32": float(answered.token_ids == reference.token_ids)}

    def _rightness(self, sample: Sample, token_ids: Sequence[int], first_logits: Tensor) -> dict[str, Any]:
        answer = answer_text(token_ids, self._engine.tokenizer, self._eos)
        right = sample.answers + sample.right_letters
        accuracy = None
        if sample.choices is not None:
            letter = chosen_letter(first_logits, self._engine.tokenizer, len(sample.choices))
            accuracy = float(letter in sample.right_letters)
        return {
            "answer": answer, "f1": token_f1(answer, right), "em": exact_match(answer, right), "accuracy": accuracy
        }  # fmt: skip


def _seconds(times: Sequence[FirstToken]) -> float:
    return median(t.seconds for t in times)
