"""What a token's KV takes, and what making KV of it again costs beside a full prefill of the same tokens.

The cost is the stage ``assemble``: dequantising, rotating and placing all documents. Of each time the least of all
rounds counts, so that what else the machine does does not.
"""

import argparse

from transformers import PreTrainedTokenizerBase

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.demo_documents import demo_documents
from kvboost_rag.loading import load_model
from kvboost_rag.quantize import KV_DTYPES

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tokens", type=int, default=2048, help="of the documents (default 2048)")
parser.add_argument("--model", default="smollm2")
parser.add_argument("--rounds", type=int, default=5, help="measurements (default 5)")
args = parser.parse_args()


def documents_of(tokenizer: PreTrainedTokenizerBase, wanted: int) -> list[Document]:
    """Take the demo's paragraphs, again and again with a number before them, and cut the last one."""
    documents, turn = [], 0
    while wanted > 0:
        turn += 1
        for document in demo_documents():
            ids = tokenizer(f"{turn}. {document.text}").input_ids[: max(0, wanted)]
            if ids:
                documents.append(Document(f"{turn} {document.id}", tokenizer.decode(ids)))
            wanted -= len(ids)
    return documents


model, tokenizer = load_model(args.model)
documents = documents_of(tokenizer, args.tokens)
options = {"documents": documents, "max_tokens": 1}
engines = {kv_dtype: KVBoostEngine(model, tokenizer, kv_dtype=kv_dtype, max_prefix_bytes=0) for kv_dtype in KV_DTYPES}
for engine in engines.values():
    engine.add_documents(documents)
reports = {kv_dtype: [] for kv_dtype in engines}
full = []
for _ in range(args.rounds):
    full.append(engines["native"].generate("Why?", reuse=False, **options).report.stages["prefill"])
    for kv_dtype, engine in engines.items():
        reports[kv_dtype].append(engine.generate("Why?", repair="none", **options).report.stages["assemble"])

stats = engines["native"].stats
print(f"{stats.document_tokens} tokens in {stats.documents} documents; full prefill {1000 * min(full):.0f} ms")
print(f"{'kv_dtype':<10} {'bytes a token':>13} {'of native':>9} {'assemble, ms':>12} {'of prefill':>10}")
for kv_dtype, engine in engines.items():
    share, seconds = engine.stats.store_bytes / stats.store_bytes, min(reports[kv_dtype])
    per_token = engine.stats.store_bytes / stats.document_tokens
    print(f"{kv_dtype:<10} {per_token:>13.0f} {share:>9.4f} {1000 * seconds:>12.1f} {seconds / min(full):>10.2%}")
