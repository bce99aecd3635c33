"""The code blocks of the documentation, and what they print."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)

_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# What differs from run to run; pages may leave it out.
_TIME = re.compile(r"(?:\d+(?:\.\d+)?|…) (ms|s)\b")


@dataclass(frozen=True)
class Block:
    """Python code of a page, and what the page says it prints, None if it says nothing."""

    path: Path
    line: int
    code: str
    shown: str | None


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = _BLOCK.finditer(text)
    return [Block(path, text.count("\n", 0, match.start(1)), match[1], match[2]) for match in found]


def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Run a block and return what it prints; a traceback shows the page's own lines."""
    code = compile("\n" * block.line + block.code, str(block.path), "exec")
    with redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    return out.getvalue()


def without_times(text: str) -> str:
    return _TIME.sub(r"# \1", text)
