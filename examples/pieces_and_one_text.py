"""Count the tokens in which prompts, tokenised in pieces, differ from the same texts tokenised as one."""

import argparse
from difflib import SequenceMatcher
from pathlib import Path

from kvboost_rag import KVBoostEngine
from kvboost_rag.bench.data import fitted, read_samples
from kvboost_rag.layouts import LAYOUTS
from kvboost_rag.loading import load_model
from kvboost_rag.tokens import Tokens

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--documents", type=int, default=5, help="in a prompt (default 5)")
args = parser.parse_args()
model, tokenizer = load_model(args.model)


def differing(pieces: list[int], whole: list[int]) -> int:
    """Count the pieces' tokens that the whole text does not have in their place."""
    blocks = SequenceMatcher(a=pieces, b=whole, autojunk=False).get_matching_blocks()
    return len(pieces) - sum(block.size for block in blocks)


for path in sorted((Path(__file__).parent / "data").glob("*.jsonl")):
    samples = [fitted(sample, Tokens(tokenizer), args.documents, None) for sample in read_samples(path)]
    for name, layout in LAYOUTS.items():
        engine = KVBoostEngine(model, tokenizer, reuse="off", layout=layout)
        counts = []
        for sample in samples:
            pieces = engine.tokenize(sample.prompt, documents=sample.documents).tolist()
            text = tokenizer.decode(pieces, clean_up_tokenization_spaces=False)
            counts.append((differing(pieces, tokenizer(text, add_special_tokens=False).input_ids), len(pieces)))
        different, tokens = map(sum, zip(*counts, strict=True))
        same = sum(not count for count, _ in counts)
        print(f"{path.stem} {name}: {same} of {len(counts)} prompts alike; {different} of {tokens} tokens differ")
