"""Plant one fault after the other in a copy of the package, and see that the tests notice: ``make faults``.

``python tests/faults.py [WORDS...]`` takes those faults alone whose file or tests hold one of the words. Prints a
table; ends with the number of faults that no test noticed. Needs a system that can fork.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path

import pytest
from planted import FAULTS, Fault
from tiny import tiny_model

import kvboost_rag

ROOT = Path(__file__).parent.parent
SECONDS = 300
# Modules that transformers imported before pytest did are none of the tests.
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
# What pytest ends with when tests failed, and not because they could not be collected.
FAILED = 1


def main() -> int:
    """Plant the faults that are asked for; return how many were not noticed."""
    words = sys.argv[1:]
    _leave_the_libraries_alone()
    chosen = [f for f in FAULTS if not words or any(word in f.file + f.tests for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in ("kvboost_rag", "integrations", "tests", "docs", "examples", "notebooks", "pyproject.toml"):
            (shutil.copytree if (ROOT / name).is_dir() else _copied)(ROOT / name, copy / name)
        return sum(missed(copy, tests, list(group)) for tests, group in groupby(chosen, key=lambda fault: fault.tests))


def _leave_the_libraries_alone() -> None:
    """Forget the package and the modules of the tests, but not the large libraries that every fork has then."""
    tiny_model("llama")
    with redirect_stdout(io.StringIO()):
        pytest.main(["--version", "--version", *OPTIONS])
    ours = {kvboost_rag.__name__, *(path.stem for path in ROOT.glob("tests/*.py"))}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]


def _copied(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def missed(copy: Path, tests: str, faults: list[Fault]) -> int:
    """Return how many faults some tests do not notice."""
    status, seen = tested(copy, tests, keep_compiled=True)
    if status != 0:
        raise SystemExit(f"{tests} fails without any fault: {seen}")
    return sum(not is_noticed(copy, fault) for fault in faults)


def is_noticed(copy: Path, fault: Fault) -> bool:
    """Plant a fault, run its tests, take it out again, and print what they said."""
    path = copy / "kvboost_rag" / fault.file
    before, sound = path.stat(), path.read_text(encoding="utf-8")
    path.write_text(planted(sound, fault), encoding="utf-8")
    start = time.perf_counter()
    try:
        status, seen = tested(copy, fault.tests)
    finally:
        path.write_text(sound, encoding="utf-8")
        # The compiled module is known by the time of its source.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = {FAILED: "noticed", 0: "NOT NOTICED", None: "noticed, it hangs"}.get(status, f"pytest ended with {status}")
    change = " -> ".join(re.sub(r"\s+", " ", text.strip()) or "(nothing)" for text in (fault.old, fault.new))
    row = f"{result} | {fault.file} | {change} | {seen} | {time.perf_counter() - start:.0f} s"
    sys.stdout.write(row + "\n")
    sys.stdout.flush()
    return status in (FAILED, None)


def planted(sound: str, fault: Fault) -> str:
    """Return a file's text with the fault in it.

    Raises
    ------
    ValueError
        If the place is not there any more, or not the only one.
    """
    if sound.count(fault.old) != 1:
        raise ValueError(f"{fault.file} holds {fault.old!r} {sound.count(fault.old)} times; it must be once")
    return sound.replace(fault.old, fault.new)


def tested(copy: Path, tests: str, *, keep_compiled: bool = False) -> tuple[int | None, str]:
    """Run tests in a process of its own; return pytest's status (None: it was stopped) and the first failure."""
    log = copy.parent / "log"
    process = multiprocessing.get_context("fork").Process(target=_run, args=(copy, tests, log, keep_compiled))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return None, f"stopped after {SECONDS} s"
    found = re.search(r"^(FAILED|ERROR) .*", log.read_text(encoding="utf-8"), re.MULTILINE)
    return process.exitcode, found[0] if found else ""


def _run(copy: Path, tests: str, log: Path, keep_compiled: bool) -> None:
    os.chdir(copy / "tests")
    paths = [str(copy), str(copy / "integrations")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.dont_write_bytecode = not keep_compiled
    sys.path[:0] = paths
    with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        status = pytest.main([*OPTIONS, *shlex.split(tests)])
    os._exit(int(status))


if __name__ == "__main__":
    sys.exit(main())
