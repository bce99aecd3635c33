"""The import direction of ARCHITECTURE.md, and what importing must not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvboost_rag

PACKAGE = Path(kvboost_rag.__file__).parent
# A module imports from rows above its own, and nothing else of this package; a package's own files may share.
ORDER = [
    {"errors", "types"},
    {"cards"},
    {
        "keys", "chunking", "quantize", "rope", "report", "converted", "generic_texts", "progress", "usage", "sizes",
        "reading", "dummy_prefix", "batching", "affinity",
    },
    {"sampling", "gguf_convert", "policy", "forgery", "owner", "structured"},
    {"messages"},
    {"model", "tokens", "store", "loading", "locate", "prompt"},
    {"contexts", "deviation", "prefix", "registry", "repair", "sensitivity"},
    {"canonical", "compose", "plan", "assemble", "prefill", "decode", "session"},
    {"encode", "answering"},
    {"spaces"},
    {"space_maker", "library"},
    {"refill"},
    {"engine_documents", "engine_scoring"},
    {"engine", "layouts"},
    {"server"},
    {"replicas"},
    {"bench", "embedding", "demo_documents", "inspection", "replay"},
    {"retrieval", "calibrate", "plots"},
    {"demo"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def modules() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(PACKAGE).with_suffix("").parts[0], path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    ]


def imported(path: Path) -> set[str]:
    """Top-level names of this package that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        names |= {name.split(".")[1] for name in found if name.startswith("kvboost_rag.")}
    return names - {"__version__"}


def test_every_module_has_a_place_in_the_order():
    assert {name for name, _ in modules()} == set(RANK)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: str(value).split("kvboost_rag/")[-1])
def test_imports_go_one_way(name, path):
    wrong = {other for other in imported(path) if other != name and RANK[other] >= RANK[name]}
    assert not wrong


def test_only_the_model_package_touches_model_internals():
    inner = ("cache_utils", "modeling_utils", "masking_utils", "AttentionInterface", "register_forward")
    for name, path in modules():
        if name != "model":
            assert not [word for word in inner if word in path.read_text(encoding="utf-8")], path


def test_nothing_dangerous_is_in_the_package():
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "marshal", "shelve", "dill"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(path)


def test_import_uses_no_network_and_loads_no_extra():
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "import kvboost_rag\n"
        "assert not {'faiss', 'gguf', 'matplotlib', 'langchain_core', 'llama_index', 'redis'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
