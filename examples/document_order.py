"""How many of the demo's questions are answered right with the best document last, and with it first."""

import sys

from kvboost_rag import KVBoostEngine
from kvboost_rag.demo import DEMO_DOCUMENTS_A_PROMPT
from kvboost_rag.demo_documents import demo_documents, demo_questions
from kvboost_rag.embedding import Embedder
from kvboost_rag.layouts import COMPLETION
from kvboost_rag.retrieval import FaissRetriever

methods = sys.argv[1:] or ["full", "none", "selective:32", "cacheblend:0.15", "random:1.0"]
retriever = FaissRetriever(demo_documents(), Embedder())
found = {q: [d for d, _ in retriever.retrieve(q.question, DEMO_DOCUMENTS_A_PROMPT)] for q in demo_questions()}

with KVBoostEngine.from_pretrained("smollm2", layout=COMPLETION, max_prefix_bytes=0) as engine:
    engine.add_documents(demo_documents())
    print(f"{'right answers of ' + str(len(found)):<24} best last  best first")
    for method in methods:
        options = {"reuse": False} if method == "full" else {"repair": method}
        right = {True: 0, False: 0}
        for question, documents in found.items():
            for last in right:
                ordered = documents[::-1] if last else documents
                text = engine.generate(
                    question.question, documents=ordered, max_tokens=24, temperature=0.0, stop="\n", **options
                ).text
                right[last] += any(answer.lower() in text.lower() for answer in question.answers)
        print(f"{method:<24} {right[True]:9}  {right[False]:10}", flush=True)
