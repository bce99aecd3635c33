"""Print the README's table from the JSON of ``kvboost-rag bench``."""

import json
import sys
from pathlib import Path
from statistics import median

from kvboost_rag.bench.summary import summarise

NAMES = {"full": "full prefill", "prefix-cache": "prefix caching"}

result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
# Summed up anew: a result of an older version may lack a column.
summary = summarise(result["samples"], list(result["summary"]))["summary"]
n = len(result["samples"])
print(
    "| method | TTFT, full prefill = 1 | recomputed | KL, nats a token (p95) | same next token | F1 "
    "| F1 less full prefill's (95 % interval) | EM |"
)
print("|---|---|---|---|---|---|---|---|")
for method, row in summary.items():
    plain = method in NAMES
    share = "all" if plain else f"{100 * row['recomputed_share']:.0f} %"
    mean, lower, upper = row["f1_difference"]
    difference = "" if plain else f"{mean:+.3f} ({lower:+.3f} to {upper:+.3f})"
    print(
        f"| {NAMES.get(method, f'`{method}`')} | {row['ttft_ratio']:.2f} | {share} | {row['kl']:.3f} "
        f"({row['kl_p95']:.3f}) | {100 * row['top1']:.1f} % | {row['f1']:.3f} | {difference} | {row['em']:.3f} |"
    )
tokens = median(sample["prompt_tokens"] for sample in result["samples"])
print(f"\n{n} samples, median {tokens:.0f} prompt tokens; full prefill fails {result['full_failures']} of them.")
