"""How the locator keeps its rows, and what it costs, by counting operations, rows and bytes."""

from __future__ import annotations

import gc
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost_rag.locate import Locator, hashing, index, prefixes, shelf

# A busy machine must not fail a test.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def locator(documents, min_cut=64):
    found = Locator(min_cut)
    for handle, text in documents:
        found.add(handle, text)
    return found


@pytest.mark.parametrize(
    ("documents", "prompt"),
    [
        (["a" * n for n in range(16, 400)], "a" * 3000),
        (["a" * n + "b" for n in range(16, 400)], "a" * 350 + "b" + "a" * 3000),
        (["c" * n + "a" + "b" * m for n in range(16, 60) for m in range(8)], "c" * 2000 + "abbb"),
        (["x" * 500 + f"{n:04}" for n in range(2000)], "x" * 700 + "0042" + "x" * 600),
        (["the very same text, many times"] * 2000, "the very same text, many times" * 20),
    ],
    ids=["repeated", "ended", "crossed", "shared", "equal"],
)
def test_work_grows_with_the_prompt_and_not_with_the_documents(documents, prompt, monkeypatch):
    found = locator(enumerate(documents))
    found.locate("")
    for handle in range(0, len(documents), 3):
        found.remove(handle)
    compared, climbed, followed = [], [], []
    length, climb, find = prefixes.Ancestors._length, shelf.common_length, shelf._find
    monkeypatch.setattr(prefixes.Ancestors, "_length", lambda *items: climbed.append(1) or length(*items))
    monkeypatch.setattr(shelf, "common_length", lambda *items: compared.append(1) or climb(*items))
    monkeypatch.setattr(shelf, "_find", lambda *items: followed.append(1) or find(*items))
    matches = found.locate(prompt)
    assert matches and matches == reference_of_repeated(found, matches, prompt)
    assert len(compared) <= 3 * len(prompt) and len(followed) <= 6 * len(prompt)
    assert len(climbed) <= 4 * len(prompt) * np.log2(len(documents))


def reference_of_repeated(found, matches, prompt):
    """The matches again, as far as they are what they say: the slow reference is too slow here."""
    return [
        match
        for match in matches
        if found._texts[match.handle].startswith(prompt[match.start : match.end])
        and match.complete is (len(found._texts[match.handle]) == match.end - match.start)
    ]


def test_climbing_takes_logarithmic_time(monkeypatch):
    ancestors = prefixes.Ancestors([*("a" * n for n in range(1, 2001)), ""], [(0, 2000)])
    steps, length = [], ancestors._length
    monkeypatch.setattr(ancestors, "_length", lambda row: steps.append(1) or length(row))
    for wanted in range(2001):
        steps.clear()
        assert length(ancestors.climb(1999, wanted)) == wanted
        assert len(steps) <= 6 * np.log2(2000)


def test_adding_and_searching_in_turn_keeps_shelves_few_and_merges_cheap(monkeypatch):
    sorted_rows, make = [], index.Shelf
    monkeypatch.setattr(index, "Shelf", lambda handles, *rest: sorted_rows.append(len(handles)) or make(handles, *rest))
    found = Locator()
    for handle in range(600):
        found.add(handle, f"document number {handle} with some text")
        found.locate("")
        assert len(found._wide._shelves) <= 1 + np.log(handle + 1) / np.log(4)
    assert sum(sorted_rows) <= 600 * 5 * np.log(600) / np.log(4)


def test_removing_frees_rows_and_texts():
    found = locator((handle, f"document number {handle} with some text") for handle in range(1000))
    found.locate("")
    for handle in range(999):
        found.remove(handle)
        assert len(found._wide._shelves[0]) <= 2 * len(found) + 1
    found.remove(999)
    assert found._wide._shelves == []


@relaxed
@given(st.text(min_size=32, max_size=100))
def test_the_three_ways_to_hash_agree(text):
    for width in (16, 32):
        windows = hashing.hash_windows(text, width)
        assert len(windows) == len(text) - width + 1
        for place in range(len(windows)):
            window = "".join(text[place : place + width])
            assert windows[place] == hashing.anchor_of(window, width)
    if not text[0].isspace():
        assert hashing.anchors_of([text], 32)[0] == hashing.hash_windows(text, 32)[0]


@relaxed
@given(st.text(alphabet="ab", max_size=9), st.text(alphabet="ab", max_size=9))
def test_common_length(first, second):
    assert prefixes.common_length(first, second) == len(os.path.commonprefix([first, second]))


@pytest.mark.parametrize("padding", ["", " "])
def test_memory_of_its_own_is_below_200_bytes_a_document(padding):
    documents = [f"{padding}document number {n} {'x' * 300}" for n in range(20_000)]
    gc.collect()
    tracemalloc.start()
    try:
        found = locator(enumerate(documents))
        found.locate("")
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 200 * len(documents)
    assert found.nbytes == pytest.approx(used, rel=0.1)


def test_a_handle_used_again_for_the_same_text_is_removed_where_it_is():
    text = "a text registered twice"
    found = locator([(1, text), (2, text), *((handle, f"{text} {handle}") for handle in range(10, 20))])
    found.locate("")
    found.remove(2)
    found.add(2, text)
    found.locate("")
    found.remove(2)
    found.remove(1)
    assert found.locate(text) == []
