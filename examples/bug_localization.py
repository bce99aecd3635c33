"""Four-choice bug-localization samples from any git history: which of four files does a fix have to change.

A commit is taken if it is no merge, its subject (or a line of its body that begins so: "Fixes #3") speaks of a fix,
and it changes the text of exactly one source file that was there before. Reverts and fixes of typos, comments, style
or linting are left out. A source file has a known extension and is neither a test nor in a folder of tests or docs;
those and data may change along. A renamed file counts as one removed and one added.

The documents are four files as the parent commit has them: the changed one, and the three nearest (fewest folders
apart, else by chance) with its extension. Each is cut after the same number of characters from its start; a commit
that touches a line beyond the cut is left out, and so are files that are no UTF-8 text, shorter than 200 characters,
or equal to one already chosen. The question is the commit message without trailers, names of source files, and the
four candidates' module names and distinguishing folders in any spelling ("disk_store", "DiskStore", "disk store").
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

MIN_CHARACTERS, MIN_WORDS, MAX_MESSAGE = 200, 5, 3000
REQUEST = "Which file has to be changed for this?"
_EXTENSION = r"\.(?:c|cc|cpp|cs|cxx|clj|erl|exs?|f90|go|hh?|hpp|hs|java|jl|[cm]?jsx?|kt|lua|mm?|ml|php|pl|pyx?|r|rb|rs"
_EXTENSION += r"|scala|sh|swift|tsx?|vue)"
_SOURCE = re.compile(rf".*[^/]{_EXTENSION}", re.IGNORECASE | re.DOTALL)
_FILE_NAME = re.compile(rf"(?<![\w./\\-])[\w./\\-]*[\w-]{_EXTENSION}\b", re.IGNORECASE)
_TEST = re.compile(r"tests?|conftest|test[_-].*|.*[._-](?:tests?|spec)|.*[a-z0-9](?:Tests?|Spec)")
_OTHER_FOLDERS = {"doc", "docs", "fixtures", "spec", "specs", "test", "testdata", "testing", "tests", "__tests__"}
_FOLDER_MODULES = {"__init__", "index", "lib", "main", "mod"}
_FIX = r"(?:bugs?|crash\w*|(?:hot|bug)?fix(?:e[sd]|ing)?|regress\w+|repair(?:s|ed|ing)?)\b"
_IS_FIX = re.compile(rf"\A.*\b{_FIX}|^\s*{_FIX}", re.IGNORECASE | re.MULTILINE)
_NO_BUG = re.compile(
    r"\A(?:fixup|squash|revert)|\A.*\b(?:typos?|spelling|lint\w*|comments?|docs?|docstrings?|whitespace|style)\b"
    r"|^\s*(?:diff --git |@@ -\d)",
    re.IGNORECASE | re.MULTILINE,
)
_TRAILER = re.compile(r"^(?:[\w-]+-(?:by|id): |\(cherry picked from ).*$", re.IGNORECASE | re.MULTILINE)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? ", re.MULTILINE)
_HIDDEN_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_EXTERNAL_DIFF")
# No protocol is allowed, so that a clone without all objects fails instead of fetching them.
_VARIABLES = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}


class InputError(Exception):
    """What the caller can put right: one line, with the remedy."""


class _Skip(Exception):
    """Why a commit gives no sample."""


class _Commit(NamedTuple):
    id: str
    short: str
    parent: str
    message: str


def build_samples(
    repository: Path, limit: int | None = None, seed: int = 0, max_file_characters: int = 8000
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Make samples of the commits that HEAD reaches, newest first.

    Parameters
    ----------
    repository
        Folder of a clone with its whole history.
    limit
        How many samples at most; None for all.
    seed
        Decides, with each commit's id, which of equally near files are taken and the order of the documents.
    max_file_characters
        Where every file is cut.

    Returns
    -------
    tuple[list[dict[str, Any]], Counter[str]]
        At least one sample, and how many commits were left out for which reason.

    Raises
    ------
    InputError
        If git is missing or fails, the history is not complete, or no commit fits.
    """
    samples: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for commit in _commits(repository):
        if len(samples) == limit:
            break
        try:
            samples.append(_sample(repository, commit, seed, max_file_characters))
        except _Skip as reason:
            skipped[str(reason)] += 1
    if not samples:
        raise InputError(f"no fitting commits in {repository} ({_counted(skipped)}); give one with more bug fixes")
    return samples, skipped


def overlap_accuracy(samples: Sequence[dict[str, Any]]) -> float:
    """Answer by word overlap alone; the mean over the samples of being right, 0 to 1.

    With q and d the counts of each lower-case word (identifiers are split at underscores and capitals) in the
    question without its request and in a document's text, the answer is the document with the highest

        overlap(q, d) = sum over words w of min(q(w), d(w))  /  sum over words w of q(w)

    Where k documents share it, a right one among them counts 1/k.
    """
    return sum(map(_overlap_right, samples)) / len(samples)


def _overlap_right(sample: dict[str, Any]) -> float:
    question = _words(sample["question"].removesuffix(REQUEST))
    # The divisor is the same for all documents of a sample, so that it can be left out here.
    scores = {d["title"]: sum((question & _words(d["text"])).values()) for d in sample["documents"]}
    best = [title for title, score in scores.items() if score == max(scores.values())]
    return (sample["answers"][0] in best) / len(best)


def _words(text: str) -> Counter[str]:
    return Counter(part.lower() for part in _PARTS.findall(text))


def _git(repository: Path, *arguments: str) -> bytes:
    variables = {name: value for name, value in os.environ.items() if name not in _HIDDEN_VARIABLES} | _VARIABLES
    command = ["git", "--literal-pathspecs", "-C", str(repository), "-c", "i18n.logOutputEncoding=UTF-8", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=variables, check=False)
    except OSError as error:
        raise InputError(f"git can not be run ({error.strerror}); install it and put it on PATH") from error
    if done.returncode:
        said = (done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}").splitlines()[0]
        raise InputError(f"git can not read {repository} ({said}); give the folder of a complete clone with commits")
    return done.stdout


def _commits(repository: Path) -> list[_Commit]:
    if _git(repository, "rev-parse", "--is-shallow-repository").strip() == b"true":
        raise InputError(f"{repository} has a shallow history; run git fetch --unshallow in it first")
    form = "--format=%H%x00%h%x00%P%x00%B"
    out = _git(repository, "log", "-z", "--no-merges", "--no-show-signature", "--no-color", "--abbrev=12", form, "HEAD")
    fields = out.decode("utf-8", "replace").split("\0")
    return [_Commit(*fields[i : i + 4]) for i in range(0, len(fields) - 3, 4)]


def _sample(repository: Path, commit: _Commit, seed: int, cut: int) -> dict[str, Any]:
    message = commit.message.strip()
    if not _IS_FIX.search(message) or _NO_BUG.search(message):
        raise _Skip("not a bug fix by the message")
    changed, rng = _changed_file(repository, commit), random.Random(f"{seed} {commit.id}")
    texts = _candidates(repository, commit, changed, rng, cut)
    order = sorted(texts)
    rng.shuffle(order)
    return {
        "id": commit.short, "task": "bug_localization", "source": f"{repository.resolve().name}@{commit.id}",
        "documents": [{"title": path, "text": texts[path]} for path in order],
        "question": _question(message, order), "answers": [changed], "choices": order,
    }  # fmt: skip


def _changed_file(repository: Path, commit: _Commit) -> str:
    if not commit.parent:
        raise _Skip("first of the history")
    out = _git(repository, "diff-tree", "-r", "-z", "--no-renames", "--name-status", commit.parent, commit.id)
    fields = os.fsdecode(out).split("\0")
    sources = [(status, path) for status, path in zip(fields[::2], fields[1::2], strict=False) if _is_source(path)]
    if len(sources) != 1 or sources[0][0] != "M":
        raise _Skip("not exactly one source file changed that was there before")
    return sources[0][1]


def _is_source(path: str) -> bool:
    file = PurePosixPath(path)
    other = _TEST.fullmatch(file.stem) or _OTHER_FOLDERS.intersection(map(str.lower, file.parts[:-1]))
    return bool(_SOURCE.fullmatch(path)) and not other


def _candidates(repository: Path, commit: _Commit, changed: str, rng: random.Random, cut: int) -> dict[str, str]:
    blobs = _blobs(repository, commit.parent)
    text = _text(repository, blobs[changed], cut) if changed in blobs else None
    if text is None or not 0 <= _last_changed(repository, commit, changed, text) <= cut:
        raise _Skip("changed file short, not text, or changed beyond the cut")
    chosen = {changed: text[:cut]}
    for path in _nearest(blobs, changed, rng):
        other = None if _key(path) in map(_key, chosen) else _text(repository, blobs[path], cut)
        if other is not None and other[:cut] not in chosen.values():
            chosen[path] = other[:cut]
        if len(chosen) == 4:
            return chosen
    raise _Skip("fewer than three files to choose from beside it")


def _blobs(repository: Path, tree: str) -> dict[str, str]:
    entries = os.fsdecode(_git(repository, "ls-tree", "-r", "-z", "--full-tree", tree)).split("\0")
    split = (entry.partition("\t") for entry in entries if entry.startswith("100"))  # neither links nor submodules
    # Paths with spaces or control characters would not survive as options of a prompt.
    return {path: m.split()[2] for m, _, path in split if path.isprintable() and " " not in path and _is_source(path)}


def _nearest(blobs: dict[str, str], changed: str, rng: random.Random) -> list[str]:
    file = PurePosixPath(changed)
    others = sorted(path for path in blobs if path != changed and PurePosixPath(path).suffix == file.suffix)
    rng.shuffle(others)
    return sorted(others, key=lambda path: _steps(PurePosixPath(path).parts[:-1], file.parts[:-1]))


def _steps(one: Sequence[str], other: Sequence[str]) -> int:
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return len(one) + len(other) - 2 * shared


def _key(path: str) -> str:
    # The benchmark compares options without punctuation: a/b.py and ab.py would both count as right.
    return re.sub(r"[\W_]", "", path.lower())


def _text(repository: Path, blob: str, cut: int) -> str | None:
    try:
        text = _git(repository, "cat-file", "blob", blob).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or len(text[:cut].strip()) < MIN_CHARACTERS else text


def _last_changed(repository: Path, commit: _Commit, path: str, text: str) -> int:
    """Find where in the earlier text the last touched line ends, in characters; -1 if only the mode changed."""
    flags = ("-p", "-U0", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    hunks = _HUNK.findall(_git(repository, "diff-tree", *flags, commit.parent, commit.id, "--", path))
    last = max((int(start) + max(int(count or 1), 1) - 1 for start, count in hunks), default=-1)
    return -1 if last < 0 else len("\n".join(text.split("\n")[:last]))


def _question(message: str, paths: Sequence[str]) -> str:
    text = _names(paths).sub("…", _FILE_NAME.sub("…", _TRAILER.sub("", message[:MAX_MESSAGE]))).strip()
    if len(re.findall(r"[^\W\d_]{2,}", text)) < MIN_WORDS:
        raise _Skip("message too short without names")
    return f"{text}\n\n{REQUEST}"


def _names(paths: Sequence[str]) -> re.Pattern[str]:
    files = [PurePosixPath(path) for path in paths]
    folders = [set(file.parts[:-1]) for file in files]
    names = {file.stem for file in files} | (folders[0].union(*folders) - folders[0].intersection(*folders))
    names |= {file.parent.name for file in files if file.stem in _FOLDER_MODULES}
    spelled = [_spelled(name) for name in sorted(names, key=lambda n: (-len(n), n)) if len(name) > 1] or ["(?!)"]
    return re.compile(rf"(?<!\w)(?:[\w-]+(?:[./\\]|::))*_*(?:{'|'.join(spelled)})_*(?!\w)", re.IGNORECASE)


def _spelled(name: str) -> str:
    *first, last = _PARTS.findall(name) or [name]
    stem = last[:-1] if len(last) > 3 and last.endswith("s") else last
    return r"[\s_.-]{0,2}".join(map(re.escape, (*first, stem))) + "(?:e?s)?"


def _counted(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "none"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", type=Path, help="folder of a complete clone")
    parser.add_argument("--output", type=Path, required=True, help="file for the samples, JSON lines")
    parser.add_argument("--limit", type=int, help="newest so many samples (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of neighbours and order (default %(default)s)")
    parser.add_argument("--max-file-characters", type=int, default=8000, help="cut files here (default %(default)s)")
    return parser.parse_args(given)


def _check(args: argparse.Namespace) -> None:
    if not args.output.parent.is_dir():
        raise InputError(f"the folder of output {args.output} does not exist; make it, or choose another one")
    if args.max_file_characters < MIN_CHARACTERS or (args.limit is not None and args.limit < 1):
        raise InputError(f"give --limit at least 1, and --max-file-characters at least {MIN_CHARACTERS}")


def main(given: Sequence[str] | None = None) -> int:
    """Write the samples and print the baselines; returns 1 if the input can not be used."""
    args = _arguments(given)
    try:
        _check(args)
        samples, skipped = build_samples(args.repository, args.limit, args.seed, args.max_file_characters)
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        args.output.write_text(lines, encoding="utf-8", newline="\n")
    except (InputError, OSError) as error:
        said = f"can not write ({error}); choose another output" if isinstance(error, OSError) else error
        print(f"error: {said}", file=sys.stderr)
        return 1
    data, figures = shlex.quote(str(args.output)), shlex.quote(f"{args.output.with_suffix('')}.bench.json")
    print(f"samples: {len(samples)} (commits left out: {_counted(skipped)})")
    print(f"chance baseline: 0.25\nword-overlap baseline: {overlap_accuracy(samples):.3f}\nmeasure a model with:")
    print(f"  kvboost-rag bench --data {data} --layout chat --model MODEL --output {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
