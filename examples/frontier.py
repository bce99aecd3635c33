"""Draw KL and F1 against TTFT from one or more results of ``kvboost-rag bench`` on the same samples."""

import argparse
import json
from pathlib import Path

from kvboost_rag.plots import frontier

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("results", type=Path, nargs="+", help="JSON files; the first one's full prefill counts")
parser.add_argument("--output", type=Path, required=True, help="PNG or SVG file")
args = parser.parse_args()

results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
if len({tuple(sample["id"] for sample in result["samples"]) for result in results}) > 1:
    parser.error("the results are not of the same samples")
summary = {name: row for result in reversed(results) for name, row in result["summary"].items()}
frontier(summary, f"{results[0]['setup']['model']}, {results[0]['setup']['options']['data']}").save(args.output)
