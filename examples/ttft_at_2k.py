"""TTFT at 2,048 tokens of known documents and a 40-token question, as a ratio to full prefill of the same tokens."""

import sys
from statistics import median

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

METHODS = ("full", "none", "selective:16", "cacheblend:0.15")
QUESTION = "Which of these texts speaks of a river, and what does it say of the people who lived there in old times?"
rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5

with KVBoostEngine.from_pretrained("smollm2", max_prefix_bytes=0) as engine:
    ids, tokens = [], 0
    for document in demo_documents():
        room = 2048 - tokens
        text = engine.tokenizer.decode(engine.tokenizer(document.text).input_ids[:room])
        engine.add_documents([Document(document.id, text)])
        ids.append(document.id)
        tokens = engine.stats.document_tokens
        if tokens >= 2048:
            break
    times = {method: [] for method in METHODS}
    for turn in range(rounds + 1):
        for method in METHODS:
            options = {"reuse": False} if method == "full" else {"repair": method}
            report = engine.generate(QUESTION, documents=ids, max_tokens=1, **options).report
            if turn:
                times[method].append(report.ttft)
    print(f"{report.prompt_tokens} prompt tokens, {tokens} of {len(ids)} documents")
    for method in METHODS:
        ratios = [t / f for t, f in zip(times[method], times["full"], strict=True)]
        print(f"{method:<16} {1000 * median(times[method]):7.0f} ms   {median(ratios):.3f} of full prefill")
