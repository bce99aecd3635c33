"""The example that makes bug-localization samples, on histories made by real git commands."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvboost_rag.bench.data import read_samples

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "examples" / "bug_localization.py"
SPEC = importlib.util.spec_from_file_location("bug_localization", PROGRAM)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
NAMES = ("disk_store", "parser", "render", "network", "sorting")
MESSAGE = "Fix {}: the last entry is lost when the input ends without a line break"


def code(name: str, version: int = 1) -> str:
    lines = [f"def {name}_{i}(value):\n    return value + {i}\n" for i in range(8)]
    return "\n".join(lines) + f"\nVERSION = {version}  # of {name}\n"


class History:
    """A repository that depends neither on the user's settings nor on the clock."""

    def __init__(self, folder: Path):
        self.folder, self.seconds = folder, 1_700_000_000
        folder.mkdir()
        self.git("init", "--quiet")
        self.git("symbolic-ref", "HEAD", "refs/heads/trunk")

    def git(self, *arguments: str) -> str:
        self.seconds += 60
        date = f"{self.seconds} +0000"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env = kept | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
        who = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com", "-c", "commit.gpgSign=false")
        command = ["git", *who, "-c", "core.autocrlf=false", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str, **files: str | bytes | None) -> str:
        for name, text in files.items():
            self.put(name, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def put(self, name: str, text: str | bytes | None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def history(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    made = History(tmp_path / "project")
    made.commit("Begin", **{f"pkg/{name}.py": code(name) for name in NAMES}, **{"README.md": "A project.\n"})
    return made


def samples_of(history: History, **options) -> list[dict]:
    return example.build_samples(history.folder, **options)[0]


def failure(capsys, *arguments: object) -> str:
    assert example.main([str(a) for a in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_sample_holds_the_code_before_the_fix(history):
    before = code("parser", 2)
    history.commit("Parser: count versions", **{"pkg/parser.py": before})
    fix = history.commit(
        MESSAGE.format("pkg/parser.py"),
        **{"pkg/parser.py": code("parser", 3), "tests/test_parser.py": "assert True\n", "README.md": "Better.\n"},
    )
    history.commit("Later work", **{"pkg/parser.py": code("parser", 4), "pkg/network.py": code("network", 4)})
    (sample,) = samples_of(history)
    texts = {document["title"]: document["text"] for document in sample["documents"]}
    assert texts["pkg/parser.py"] == before
    assert all(text == code(Path(path).stem) for path, text in texts.items() if path != "pkg/parser.py")
    assert sample["answers"] == ["pkg/parser.py"]
    assert sample["choices"] == list(texts)
    assert len(set(texts)) == 4
    assert fix.startswith(sample["id"])
    assert sample["source"] == f"project@{fix}"
    assert sample["task"] == "bug_localization"


def test_commits_that_do_not_fit_are_left_out(history):
    history.commit(MESSAGE.format("two"), **{"pkg/parser.py": code("parser", 2), "pkg/render.py": code("render", 2)})
    history.commit(MESSAGE.format("new"), **{"pkg/added.py": code("added")})
    history.commit(MESSAGE.format("renamed"), **{"pkg/added.py": None, "pkg/moved.py": code("added", 2)})
    history.commit(MESSAGE.format("removed"), **{"pkg/moved.py": None})
    history.commit(MESSAGE.format("guide"), **{"README.md": "Fixed.\n", "docs/conf.py": "x = 1\n"})
    history.commit(MESSAGE.format("tests"), **{"tests/helper.py": "x = 1\n", "pkg/test_parser.py": "x = 1\n"})
    history.commit("Add a prefix to every number that fixtures print", **{"pkg/parser.py": code("parser", 5)})
    history.commit("Fix typos in the words that are shown", **{"pkg/parser.py": code("parser", 6)})
    history.commit('Revert "Fix the loss of the last entry of a list"', **{"pkg/parser.py": code("parser", 7)})
    history.commit("Fix parser.py", **{"pkg/parser.py": code("parser", 8)})
    history.git("checkout", "--quiet", "-b", "side")
    history.commit("Side work", **{"pkg/parser.py": code("parser", 9)})
    history.git("checkout", "--quiet", "trunk")
    history.git("merge", "--quiet", "--no-ff", "-m", MESSAGE.format("merge"), "side")
    with pytest.raises(example.InputError, match="no fitting commits.*6 not exactly one source file.*too short"):
        samples_of(history)
    history.commit(MESSAGE.format("good"), **{"pkg/parser.py": code("parser", 10)})
    assert len(samples_of(history)) == 1


@pytest.mark.parametrize(
    "named",
    ["pkg/disk_store.py", "disk_store.py", "disk_store", "pkg.disk_store", "Disk Store", "DiskStore", "disk-stores"],
)
def test_question_does_not_name_the_file(history, named):
    history.commit(
        f"Fix {named}: entries are lost at the end\n\nIn {named} a line (see {named}) was not read.\n\n"
        "Reviewed-by: Some One <one@example.com>",
        **{"pkg/disk_store.py": code("disk_store", 2)},
    )
    (sample,) = samples_of(history)
    question = sample["question"]
    assert "store" not in question.lower()
    assert "pkg" not in question.lower()
    assert "Reviewed" not in question
    assert question.startswith("Fix …: entries are lost at the end\n\nIn … a line (see …) was not read.")
    assert question.endswith("\n\nWhich file has to be changed for this?")


def test_question_does_not_name_other_candidates_or_their_folders(history):
    nested = {f"{top}/{top}_{i}.py": code(f"{top}{i}") for top in ("alpha", "beta") for i in (1, 2)}
    history.commit("Move", **nested, **{f"pkg/{name}.py": None for name in NAMES})
    message = "Fix alpha: unlike beta_2 and beta_1, reading stops early for a list of alphabets"
    history.commit(message, **{"alpha/alpha_1.py": code("alpha1", 2)})
    (sample,) = samples_of(history)
    assert sample["question"].startswith("Fix …: unlike … and …, reading stops early for a list of alphabets")


def test_order_is_seeded_and_the_answer_moves(history):
    for i in range(12):
        history.commit(MESSAGE.format(i), **{"pkg/parser.py": code("parser", i + 2)})
    once, again, other = (samples_of(history, seed=seed) for seed in (1, 1, 2))
    assert once == again
    assert [s["choices"] for s in once] != [s["choices"] for s in other]
    assert len({s["choices"].index("pkg/parser.py") for s in once}) > 1
    assert [s["id"] for s in samples_of(history, limit=3)] == [s["id"] for s in once[:3]]


def test_nearest_files_with_the_same_extension_are_chosen(history):
    far = {f"far/away/{i}.py": code(f"far{i}") for i in range(4)}
    near = {f"near/{name}.py": code(f"near{name}") for name in ("one", "two", "three")}
    history.commit("More", **far, **near, **{"near/script.js": code("script"), "near/deep/four.py": code("four")})
    history.commit(MESSAGE.format("it"), **{"near/one.py": code("nearone", 2)})
    (sample,) = samples_of(history)
    assert set(sample["choices"]) == {*near, "near/deep/four.py"}


def test_unusable_neighbours_are_passed_over(history):
    useless = {
        "new/binary.py": b"\0" * 400, "new/latin.py": "ä".encode("latin-1") * 400, "new/short.py": "x = 1\n",
        "new/copy.py": code("first"), "new/with space.py": code("space"), "ne/wfirst.py": code("same_letters"),
    }  # fmt: skip
    history.commit("More", **useless, **{"new/first.py": code("first")})
    (history.folder / "new/link.py").symlink_to("../pkg/parser.py")
    history.commit("Link")
    history.commit(MESSAGE.format("it"), **{"new/first.py": code("first", 2)})
    (sample,) = samples_of(history)
    others = set(sample["choices"]) - {"new/first.py"}
    assert len(others) == 3
    assert others <= {f"pkg/{name}.py" for name in NAMES}


def test_files_are_cut_alike_and_fixes_beyond_the_cut_left_out(history):
    text = code("parser")
    history.commit(MESSAGE.format("the end"), **{"pkg/parser.py": text + "END = 1\n"})
    history.commit(MESSAGE.format("the start"), **{"pkg/parser.py": "START = 1\n" + text + "END = 1\n"})
    assert len(samples_of(history)) == 2
    (sample,) = samples_of(history, max_file_characters=250)
    texts = {document["title"]: document["text"] for document in sample["documents"]}
    assert texts["pkg/parser.py"] == text[:250]
    assert {len(t) for t in texts.values()} == {250}


def test_overlap_baseline():
    def sample(question: str, *texts: str) -> dict:
        documents = [{"title": str(i), "text": text} for i, text in enumerate(texts)]
        return {"question": f"{question}\n\n{example.REQUEST}", "documents": documents, "answers": ["0"]}

    right = sample("lost entry entry", "def lost_entry(): Entry", "entry", "lost", "file changed file changed")
    wrong = sample("lost entry", "lost", "lostEntry", "nothing", "else")
    tied = sample("lost entry", "lost lost lost", "entry", "nothing", "else")
    assert example.overlap_accuracy([right]) == 1
    assert example.overlap_accuracy([wrong]) == 0
    assert example.overlap_accuracy([tied]) == 0.5
    assert example.overlap_accuracy([right, wrong, tied]) == 0.5


def test_output_is_what_the_benchmark_reads(history, tmp_path):
    for i in range(4):
        history.commit(MESSAGE.format(i) + " – naïve", **{f"pkg/{NAMES[i]}.py": code(NAMES[i], 2)})
    output = tmp_path / "bugs.jsonl"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(history.folder), "--output", str(output)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("samples: 4 (")
    assert "chance baseline: 0.25\nword-overlap baseline: " in done.stdout
    assert f"kvboost-rag bench --data {output} --layout chat" in done.stdout.splitlines()[-1]
    check_file(output, 4)


def check_file(output: Path, count: int) -> None:
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    samples = read_samples(output)
    assert len(rows) == len(samples) == count
    for row, sample in zip(rows, samples, strict=True):
        assert sample.right_letters == ("ABCD"[row["choices"].index(row["answers"][0])],)
        assert [document.metadata["title"] for document in sample.documents] == row["choices"]
        assert Path(row["answers"][0]).name not in sample.question


def test_bad_input_is_one_line_with_the_remedy(history, tmp_path, capsys, monkeypatch):
    output = tmp_path / "bugs.jsonl"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not a git repository" in failure(capsys, empty, "--output", output)
    assert "complete clone" in failure(capsys, tmp_path / "missing", "--output", output)
    assert "no fitting commits" in failure(capsys, history.folder, "--output", output)
    assert "make it" in failure(capsys, history.folder, "--output", tmp_path / "none" / "bugs.jsonl")
    assert "at least 1" in failure(capsys, history.folder, "--output", output, "--limit", 0)
    assert "200" in failure(capsys, history.folder, "--output", output, "--max-file-characters", 10)
    fresh = History(tmp_path / "fresh")
    assert "with commits" in failure(capsys, fresh.folder, "--output", output)
    history.commit(MESSAGE.format("it"), **{"pkg/parser.py": code("parser", 2)})
    assert "choose another output" in failure(capsys, history.folder, "--output", empty)
    history.git("clone", "--quiet", "--depth", "1", history.folder.as_uri(), str(tmp_path / "shallow"))
    assert "--unshallow" in failure(capsys, tmp_path / "shallow", "--output", output)
    monkeypatch.setenv("PATH", str(empty))
    assert "install it" in failure(capsys, history.folder, "--output", output)
    assert not output.exists()


def test_user_settings_do_not_matter(history):
    history.commit(MESSAGE.format("it"), **{"pkg/parser.py": code("parser", 2)})
    expected = samples_of(history)
    for setting in ("log.showSignature=true", "diff.external=false", "color.ui=always", "core.abbrev=5"):
        history.git("config", *setting.split("="))
    assert samples_of(history) == expected


def test_functions_are_short():
    import ast

    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    lengths = [node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert sorted(lengths)[len(lengths) // 2] <= 10
    assert max(lengths) <= 50


def test_this_repository(tmp_path, capsys):
    command = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository", "--show-prefix"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.split() != ["false"]:
        pytest.skip("the tests do not lie in a git checkout with its whole history")
    output = tmp_path / "bugs.jsonl"
    if example.main([str(ROOT), "--output", str(output), "--limit", "5"]):
        assert "no fitting commits" in capsys.readouterr().err
        assert not output.exists()
    else:
        check_file(output, Counter(output.read_text(encoding="utf-8"))["\n"])
