"""Every way in which documents reach the model: the same answer as without reuse, and the share that was reused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvboost_rag import KVBoostEngine

pytestmark = pytest.mark.real
SOURCE = Path(__file__).parents[2] / "examples" / "langchain_paths.py"
spec = importlib.util.spec_from_file_location("langchain_paths", SOURCE)
paths = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paths)
# An extract is a document cut at its end: its last token is text that follows.
LEAST = {"extracted": 0.9}


@pytest.fixture(scope="module")
def setting(smollm2, embeddings):
    # Without KV of earlier prompts, what is reused comes from documents alone.
    with KVBoostEngine(*smollm2, max_prefix_bytes=0) as engine:
        yield paths.Setting(engine, embeddings)


@pytest.mark.parametrize("path", paths.PATHS, ids=lambda path: path.__name__)
def test_path(path, setting):
    _, share = paths.run(path, setting, repair="none", max_tokens=1)
    assert share >= LEAST.get(path.__name__, 0.95)
    reference, none = paths.run(path, setting, reuse=False, max_tokens=3)
    answer, _ = paths.run(path, setting, repair="random:1.0", max_tokens=3)
    assert none == 0
    assert answer == reference
    assert answer.strip()
