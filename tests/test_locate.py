from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost_rag.locate import MIN_LENGTH, Locator, index, shelf
from kvboost_rag.types import Match

# A busy machine must not fail a test.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

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
            best = [(-len(os.path.commonprefix([words, text[place:end]])), words, handle) for handle, words in known]
            length, _, handle = min(best, key=lambda item: item[:2], default=(0, "", 0))
            if -length >= min_cut:
                cuts.append(Match(handle, place, place - length, False))
            place += -length if -length >= min_cut else 1
    return sorted([*whole, *cuts], key=lambda match: match.start)


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


@relaxed
@given(collections())
def test_matches_are_those_of_the_slow_reference(case):
    documents, prompt = case
    assert locator(documents).locate(prompt) == reference(documents, prompt)


@relaxed
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


@relaxed
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


def test_handles_in_use_and_unknown_handles_are_refused():
    found = locator([(1, "short")])
    with pytest.raises(ValueError, match="remove"):
        found.add(1, "another")
    with pytest.raises(ValueError, match="add"):
        found.remove(2)
    with pytest.raises(ValueError, match="at least 32"):
        Locator(min_cut=31)
