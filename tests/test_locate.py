from __future__ import annotations

import gc
import os
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.locate import MIN_LENGTH, Locator, hashing, index, prefixes, shelf
from kvboost_rag.types import Match

CUT = 32


def reference(documents, text, min_cut=CUT):
    """The contract of the locator, by looking at every document at every place."""
    known = [(handle, words.strip()) for handle, words in documents if len(words.strip()) >= MIN_LENGTH]
    whole, place = [], 0
    while place < len(text):
        here = [item for item in known if text.startswith(item[1], place)]
        if here:
            handle, words = max(here, key=lambda item: len(item[1]))
            whole.append(Match(handle, place, place + len(words), True))
        place += len(max(here, key=lambda item: len(item[1]))[1]) if here else 1
    bounds = [0, *(edge for match in whole for edge in (match.start, match.end)), len(text)]
    cuts = []
    for place, end in zip(bounds[::2], bounds[1::2], strict=True):
        while place < end:
            best = [(-common(words, text[place:end]), words, handle) for handle, words in known]
            length, _, handle = min(best, key=lambda item: item[:2], default=(0, "", 0))
            if -length >= min_cut:
                cuts.append(Match(handle, place, place - length, False))
            place += -length if -length >= min_cut else 1
    return sorted([*whole, *cuts], key=lambda match: match.start)


def common(first, second):
    return len(os.path.commonprefix([first, second]))


def locator(documents, min_cut=CUT):
    found = Locator(min_cut)
    for handle, text in documents:
        found.add(handle, text)
    return found


# Few long blocks, put together, make texts that overlap, repeat and begin each other.
BLOCKS = ["a", "b", " ", "a" * 17, "ab" * 8, "b" * 16, "a" * 16 + "b", "é\U0001f600\ud800a" * 5, "\n"]
blocks = st.sampled_from(BLOCKS)
texts = st.lists(blocks, max_size=7).map("".join)


@st.composite
def collections(draw):
    """Documents, most of which begin others or repeat them, and a prompt that holds parts of them."""
    trunks = [draw(blocks) * 4 + draw(texts) for _ in range(draw(st.integers(1, 2)))]
    begun = st.builds(lambda trunk, end, tail: trunk[:end] + tail, st.sampled_from(trunks), st.integers(14, 90), texts)
    documents = draw(st.lists(begun, min_size=1, max_size=10))
    handles = draw(st.permutations(range(len(documents))))
    parts = st.one_of(st.sampled_from(documents), begun, texts)
    return list(zip(handles, documents, strict=True)), "".join(draw(st.lists(parts, max_size=5)))


@given(collections())
def test_matches_are_those_of_the_slow_reference(case):
    documents, prompt = case
    assert locator(documents).locate(prompt) == reference(documents, prompt)


@given(st.data(), collections())
def test_adding_removing_and_searching_in_any_order(data, case):
    documents, prompt = case
    known, found = {}, Locator(CUT)
    for handle, text in data.draw(st.lists(st.sampled_from(documents), max_size=24)):
        if handle in known:
            del known[handle]
            found.remove(handle)
        else:
            known[handle] = text
            found.add(handle, text)
        if data.draw(st.booleans()):
            assert found.locate(prompt) == reference(known.items(), prompt)
    assert found.locate(prompt) == reference(known.items(), prompt)
    assert len(found) == len(known)


@given(collections())
def test_a_collision_of_hashes_never_makes_a_match(case):
    documents, prompt = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "anchors_of", lambda items, width: np.zeros(len(items), dtype=np.uint64))
        patch.setattr(shelf, "anchor_of", lambda item, width: np.uint64(0))
        patch.setattr(index, "hash_windows", lambda item, width: np.zeros(len(item), dtype=np.uint64))
        found = locator(documents)
        assert found.locate(prompt) == reference(documents, prompt)
        kept = documents[::2]
        for handle, _ in documents[1::2]:
            found.remove(handle)
        assert found.locate(prompt) == reference(kept, prompt)


def test_whole_and_cut_documents_among_other_text():
    first, second, third = ("".join(random.Random(i).choices("abcdefg \n", k=200)).strip() for i in range(3))
    found = locator([(7, f"\n {first}\t"), (8, second), (9, third)], 64)
    prompt = f"{second}{first} and {third[:100]}?{first}{third[:63]}"
    spans = [(8, second, True), (7, first, True), (9, third[:100], False), (7, first, True)]
    assert [(m.handle, prompt[m.start : m.end], m.complete) for m in found.locate(prompt)] == spans


def test_inner_white_space_must_be_equal():
    found = locator([(1, "a document of two\n\nparagraphs")])
    assert found.locate("a document of two\n\nparagraphs") and not found.locate("a document of two\nparagraphs")


@pytest.mark.parametrize("length", [MIN_LENGTH, 31, 32])
def test_short_documents_are_found_from_the_minimal_length(length):
    text = "abcdefghijklmnopqrstuvwxyz0123456789"[:length]
    assert locator([(1, text)]).locate(f"-{text}-") == [Match(1, 1, 1 + length, True)]
    assert locator([(1, f"  {text[: MIN_LENGTH - 1]}  ")]).locate(text) == []


def test_a_shorter_document_wins_where_the_longer_one_is_cut():
    short, long = "a" * 40, "a" * 40 + "b" * 60
    assert locator([(1, short), (2, long)]).locate(long[:90]) == [Match(1, 0, 40, True)]


def test_a_document_that_begins_another_is_found_behind_it_in_order():
    short, long = "a" * 40, "a" * 40 + "b" * 60
    assert locator([(1, short), (2, long)]).locate("a" * 40 + "c") == [Match(1, 0, 40, True)]


@pytest.mark.parametrize("min_cut", [32, 64, 100])
def test_a_cut_document_is_found_from_the_minimal_length(min_cut):
    found, text = locator([(1, "".join(map(chr, range(200, 400))))], min_cut), "".join(map(chr, range(200, 400)))
    for rest in ("", " and more"):
        assert found.locate(text[:min_cut] + rest) == [Match(1, 0, min_cut, False)]
        assert found.locate(text[: min_cut - 1] + rest) == []


def test_a_shared_cut_is_the_first_text_whenever_it_was_registered():
    shared = "a beginning that several documents share, all of them"
    found = locator([(handle, f"{shared} {9 - handle}") for handle in range(9)])
    assert found.locate(shared) == [Match(8, 0, len(shared), False)]
    found.add(9, f"{shared} 0")
    found.add(10, f"{shared} 0")
    assert found.locate(shared) == [Match(9, 0, len(shared), False)]
    assert len(found._wide._shelves) == 2


def test_the_neighbour_of_a_removed_first_row_is_found():
    shared = "a beginning that several documents share, all of them"
    found = locator([(handle, f"{shared}{handle}") for handle in range(4)])
    found.locate("")
    found.remove(0)
    found.remove(1)
    assert found.locate(f"{shared}0") == [Match(2, 0, len(shared), False)]


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


def test_of_equal_texts_the_first_registered_is_reported_until_removed():
    text = "a text registered twice, padded or not"
    found = locator([(5, text)])
    assert found.locate(text)[0].handle == 5
    found.add(3, f" {text} ")
    assert found.locate(text)[0].handle == 5
    found.remove(5)
    assert found.locate(text)[0].handle == 3
    found.add(5, text)
    assert found.locate(text)[0].handle == 3
    found.remove(3)
    found.remove(5)
    assert found.locate(text) == [] and len(found) == 0


def test_lone_surrogates_and_astral_characters():
    text = "\ud800\U0001f600\udfff é" * 8
    assert locator([(1, text)]).locate("\U0001f600" + text + "\ud83d\ude00") == [
        Match(1, 1, 1 + len(text.strip()), True)
    ]


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
    found = locator(enumerate(documents), 64)
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


@given(st.text(alphabet="ab", max_size=9), st.text(alphabet="ab", max_size=9))
def test_common_length(first, second):
    assert prefixes.common_length(first, second) == common(first, second)


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


def test_handles_in_use_and_unknown_handles_are_refused():
    found = locator([(1, "short")])
    with pytest.raises(ValueError, match="remove"):
        found.add(1, "another")
    with pytest.raises(ValueError, match="add"):
        found.remove(2)
    with pytest.raises(ValueError, match="at least 32"):
        Locator(min_cut=31)
