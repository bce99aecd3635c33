"""Run the notebooks beside this file from top to bottom, in place, and say what is wrong with what they show.

``python notebooks/execute.py`` runs all of them, ``python notebooks/execute.py 01 06`` those whose names begin so.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# A kernel warns that it encrypts nothing of what it says to this process, on this machine.
_ERRORS_ALONE = ["--log-level=ERROR"]
_MACHINE = re.compile(r"/(home|root|tmp|Users|work|var|private)/|[A-Z]:\\\\")


def execute(path: Path) -> NotebookNode:
    """Run a notebook in a fresh kernel and return it; the file stays as it is.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        With the traceback of the cell that failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}, record_timing=False,
        store_widget_state=False, extra_arguments=_ERRORS_ALONE,
    )  # fmt: skip
    client.execute()
    # What depends on the machine that ran it, and would change with every run.
    notebook.metadata = {"kernelspec": KERNEL}
    return notebook


def complaints(notebook: NotebookNode) -> Iterator[str]:
    """Yield what a reader of an executed notebook should not see: errors, noise, gaps, and paths of a machine."""
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        if cell.execution_count != number:
            yield f"cell {number} was not run in its turn"
        if shows_something(cell.source) and not cell.outputs:
            yield f"cell {number} shows nothing"
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number} raised {output.ename}"
            if output.get("name") == "stderr":
                yield f"cell {number} writes to stderr: {output.text[:200]}"
            if output.get("text", "x").strip() == "":
                yield f"cell {number} prints nothing"
        if _MACHINE.search(_texts(cell.outputs)):
            yield f"cell {number} shows a path of the machine"


def shows_something(source: str) -> bool:
    """Whether a cell is there to be looked at: it prints, displays, or ends with an expression."""
    tree = ast.parse(source)
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    last_shows = isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    return last_shows or bool(calls & {"print", "display"})


def _texts(outputs: Sequence[NotebookNode]) -> str:
    found = [output.get("text", "") for output in outputs]
    # The base64 of a picture may hold anything.
    found += [str(text) for o in outputs for kind, text in o.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join(found)


def main() -> int:
    """Run notebooks, write them back, and return how many there is something to complain of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="how the names begin (default: all)")
    wanted = tuple(parser.parse_args().names)
    bad = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name.startswith(wanted):
            start = time.perf_counter()
            notebook = execute(path)
            found = list(complaints(notebook))
            nbformat.write(notebook, path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s", *found, sep="\n  ", flush=True)
            bad += bool(found)
    return bad


if __name__ == "__main__":
    sys.exit(main())
