"""Where TTFT goes at a given number of known document tokens, as a ratio to full prefill of the same tokens.

``limit`` is the forward of the question alone over KV that is in place, the stage ``prefill`` of the method ``none``.
"""

import argparse
from statistics import median

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

DEFAULT = "none,sensitive:0.03,selective:4,sensitive:0.08,selective:8+sensitive:0.08,cacheblend:0.15"
QUESTION = "Which of these texts speaks of a river, and what does it say of the people who lived there in old times?"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("tokens", type=int, nargs="*", default=[2048], help="document tokens (default 2048)")
parser.add_argument("--methods", default=DEFAULT)
parser.add_argument("--rounds", type=int, default=5, help="measurements; the median counts (default 5)")
args = parser.parse_args()
methods = ["full", *args.methods.split(",")]


def documents_of(engine: KVBoostEngine, wanted: int) -> list[Document]:
    """Cut the demo's paragraphs to so many tokens; where they do not suffice, they come again with a number."""
    documents, turn = [], 0
    while wanted > 0:
        for document in demo_documents():
            text = f"{turn}. {document.text}" if turn else document.text
            ids = engine.tokenizer(text).input_ids[: max(0, wanted)]
            if ids:
                documents.append(Document(f"{turn} {document.id}", engine.tokenizer.decode(ids)))
            wanted -= len(ids)
        turn += 1
    return documents


with KVBoostEngine.from_pretrained("smollm2", max_prefix_bytes=0) as engine:
    for wanted in args.tokens:
        documents = documents_of(engine, wanted)
        engine.add_documents(documents)
        reports = {method: [] for method in methods}
        for turn in range(args.rounds + 1):
            for method in methods:
                options = {"reuse": False} if method == "full" else {"repair": method}
                report = engine.generate(QUESTION, documents=documents, max_tokens=1, **options).report
                if turn:
                    reports[method].append(report)
        full = median(r.ttft for r in reports["full"])
        limit = median(r.stages["prefill"] for r in reports["none"]) if "none" in methods else float("nan")
        tokens = engine.stats.document_tokens
        print(f"\n{tokens} tokens in {len(documents)} documents, {report.prompt_tokens} in the prompt")
        print(f"{'method':<18} {'ms':>7} {'ratio':>6} {'/limit':>6}  stages, ms")
        for method in methods:
            ttft = median(r.ttft for r in reports[method])
            stages = {name: median(r.stages[name] for r in reports[method]) for name in reports[method][0].stages}
            shown = "  ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in stages.items() if seconds > 5e-5)
            print(f"{method:<18} {1000 * ttft:7.0f} {ttft / full:6.3f} {ttft / limit:6.2f}  {shown}", flush=True)
        engine.remove_documents([document.id for document in documents])
