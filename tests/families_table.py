"""The page docs/families.md, made from the checks themselves."""

from __future__ import annotations

import sys

import torch
from test_repair import OWN_SDPA
from test_support import REFUSED
from tiny import CONFIGS, tiny_model
from transformers import AutoModelForCausalLM

from kvboost_rag import UnsupportedModelError
from kvboost_rag.model import ModelRunner, check_support

HEAD = """# Families

Made by `python tests/families_table.py > docs/families.md` from the check at load, run on tiny models of every family;
`tests/test_families.py` compares. `tests/test_exact_limits.py` holds the exact limits for each one that works. A family
that is not listed is not refused by name: the check at load decides, by measuring.

| family | class | rotation | reuse |
|---|---|---|---|
"""


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """Return the page."""
    works = [_works(name) for name in CONFIGS]
    refused = [_refused(name) for name in REFUSED]
    return HEAD + "\n".join(works + refused) + "\n"


def _works(name: str) -> str:
    runner = check_support(tiny_model(name))
    return f"| {name} | {type(runner.model).__name__} | {_rotation(runner)} | {_limits(name, runner)} |"


def _rotation(runner: ModelRunner) -> str:
    rotation = runner.architecture.rotation
    parts = ["interleaved pairs" if rotation.interleaved else "halves"]
    if 2 * rotation.tables(0, 2)[0].shape[-1] < runner.architecture.head_dim:
        parts.append("part of the dimensions")
    if len(set(rotation.kind_of) - {None}) > 1:
        parts.append("bases by layer")
    if None in rotation.kind_of:
        parts.append("some layers do not rotate")
    return ", ".join(parts)


def _limits(name: str, runner: ModelRunner) -> str:
    notes = []
    if runner.architecture.rotation.limit is not None:
        notes.append("up to the length where the angles change; longer prompts are computed whole")
    if name in OWN_SDPA:
        notes.append("`question` needs attn_implementation='eager'")
    return "works with limits: " + "; ".join(notes) if notes else "works"


def _refused(name: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REFUSED[name][0]).eval()
    try:
        check_support(model)
    except UnsupportedModelError as error:
        why = str(error).split("can not reuse KV: ")[1].split(". Use")[0]
        return f"| {name} | {type(model).__name__} | | refused: {why} |"
    raise AssertionError(f"{name} is not refused any more")


if __name__ == "__main__":
    main()
