from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost_rag.chunking import AdaptiveChunker, Chunker

# A busy machine must not fail a test.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CLOSING = "\"'”’)]」』）"


def characters(text):
    return [(i, i + 1) for i in range(len(text))]


def parts(text, ends):
    return [text[a:b] for a, b in itertools.pairwise([0, *ends])]


def cut(text, target, window=0.5):
    return parts(text, AdaptiveChunker(target, window).boundaries(text, characters(text)))


def reference_level(text, position):
    """Level of a cut, from the definition, one position at a time."""
    before = text[:position].rstrip()
    space = text[len(before) : position]
    at_space = space != "" or text[position : position + 1].isspace()
    if space.count("\n") >= 2:
        return 3
    bare = before.rstrip(CLOSING)
    near = len(before) - len(bare) < 4
    if "\n" in space or (at_space and near and bare.endswith(tuple(".!?。！？"))):
        return 2
    closed = text[position : position + 1] not in tuple(CLOSING + "。！？")
    if not space and closed and bare.endswith(tuple("。！？")):
        return 2
    return 1 if at_space else 0


def reference(text, offsets, target, window):
    """Ends of chunks by looking at every cut in the window."""
    count, ends, start = len(offsets), [], 0

    def allowed(i):
        empty = any(offsets[j][0] == offsets[j][1] for j in (i - 1, i))
        return not empty and all(end <= offsets[i][0] for _, end in offsets[:i])

    while start < count:
        rest = range(start + 1, count)
        window_ = [i for i in rest if target * (1 - window) <= i - start <= target * (1 + window) and allowed(i)]
        if count - start <= target * (1 + window):
            start = count
        elif window_:
            rank = {i: (-reference_level(text, offsets[i][0]), abs(i - start - target), i) for i in window_}
            start = min(window_, key=rank.__getitem__)
        else:
            start = next((i for i in rest if i - start > target * (1 + window) and allowed(i)), count)
        ends.append(start)
    return ends


@st.composite
def tokenised(draw):
    """A text and offsets as tokenisers give them: white space dropped or kept, characters split over tokens."""
    text = draw(st.text(alphabet="ab .\n。)é", max_size=60))
    offsets, start = [], 0
    while start < len(text):
        style = draw(st.sampled_from(["token", "token", "split", "narrow", "drop"]))
        end = min(len(text), start + draw(st.integers(1, 3)))
        if style == "token":
            offsets.append((start, end))
        elif style == "drop" and text[start].isspace():
            end = start + 1
        else:
            end = start + 1
            width = 0 if style == "narrow" else 1
            offsets += [(start, start + width)] * draw(st.integers(1, 3)) + [(start, end)]
        start = end
    return text, offsets


targets = st.integers(1, 9)
windows = st.sampled_from([0.0, 0.25, 0.5, 0.9])


@relaxed
@given(tokenised(), targets, windows)
def test_boundaries_are_those_of_the_slow_reference(document, target, window):
    text, offsets = document
    assert AdaptiveChunker(target, window).boundaries(text, offsets) == reference(text, offsets, target, window)


@relaxed
@given(st.text(alphabet="ab .\n。", max_size=200), targets, windows)
def test_chunks_cover_the_tokens_and_keep_to_the_window(text, target, window):
    chunker = AdaptiveChunker(target, window)
    ends = chunker.boundaries(text, characters(text))
    assert "".join(parts(text, ends)) == text and all(parts(text, ends))
    assert all(target * (1 - window) <= len(part) <= target * (1 + window) for part in parts(text, ends)[:-1])
    assert all(len(part) <= target * (1 + window) for part in parts(text, ends))
    assert ends == AdaptiveChunker(target, window).boundaries(text, characters(text), len(text))


@relaxed
@given(tokenised(), targets, windows)
def test_no_character_is_cut(document, target, window):
    text, offsets = document
    for end in AdaptiveChunker(target, window).boundaries(text, offsets)[:-1]:
        assert max(stop for _, stop in offsets[:end]) <= offsets[end][0]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("aaaa.\n\nbb cc. dd ee", "aaaa.\n\n"),
        ("aaaa. \n \n  b cc. dd ee", "aaaa. \n \n"),
        ("aa\nbbb cccc dddd eeee", "aa\n"),
        ("aaaa bbb ccc. dd eeee", "aaaa bbb ccc."),
        ("aa? bb ccc dd ee ffff", "aa? "),
        ('aaa "bb!" ccc dd eeee', 'aaa "bb!"'),
        ("今天天气好。我们去公园玩，好吗", "今天天气好。"),
        ("他说：「好。」我们去公园玩，好", "他说：「好。」"),
        ("他说：「好。」。我们去公园，好", "他说：「好。」。"),
        ("什么呢我们去。。。公园玩，好吗真的", "什么呢我们去。。。"),
        ('aa ("b.\'") ccc dd eee', 'aa ("b.\'")'),
        ("aaa 3.141 bbbb cc dd", "aaa 3.141"),
        ("aaaaaaa bb cccccccccc", "aaaaaaa "),
        ("aaaaaaaaaaaaaaaaaaaaa", "aaaaaaaa"),
    ],
)
def test_a_chunk_ends_at_the_best_place(text, first):
    assert cut(text, 8, 0.7)[0] == first


def test_among_equals_the_nearest_to_the_target_wins():
    assert cut("aa bb cc dd ee ff gg hh ii jj", 10)[0] == "aa bb cc "
    assert cut("aaaaaaa bbb ccccccc ddddddd", 10)[0] == "aaaaaaa bbb"


def test_the_earlier_of_two_equally_near_wins():
    assert cut("aaaaaaa\nbbb\ncccccccccccccc", 10)[0] == "aaaaaaa\n"


def test_a_small_rest_is_one_chunk():
    assert cut("a. " * 5, 10) == ["a. " * 5]
    assert len(cut("a. " * 5 + "b", 10)) == 2


def test_a_character_split_over_more_tokens_than_the_window_stays_whole():
    offsets = [(0, 1)] * 7 + [(1, 2)] * 2 + [(2, 3)]
    assert AdaptiveChunker(2, 0.0).boundaries("éab", offsets) == [7, 9, 10]
    assert AdaptiveChunker(2, 0.0).boundaries("é", offsets[:7]) == [7]


def test_without_offsets_chunks_end_at_the_target():
    assert AdaptiveChunker(10).boundaries("ignored\n\n", None, 36) == [10, 20, 30, 36]
    assert AdaptiveChunker(10).boundaries("ignored", None, 35) == [10, 20, 35]


def test_no_tokens_no_chunks():
    assert AdaptiveChunker().boundaries("", []) == []
    assert AdaptiveChunker().boundaries("", None, 0) == []
    assert AdaptiveChunker().boundaries("  \n", []) == []


@pytest.mark.parametrize("offsets", [[(0, 4)], [(-1, 1)], [(2, 1)]])
def test_offsets_of_another_text_are_refused(offsets):
    with pytest.raises(ValueError, match="this very text"):
        AdaptiveChunker().boundaries("abc", offsets)


def test_the_number_of_tokens_must_be_known_and_agree():
    with pytest.raises(ValueError, match="tokens=len"):
        AdaptiveChunker().boundaries("abc", None)
    with pytest.raises(ValueError, match="same tokenisation"):
        AdaptiveChunker().boundaries("abc", characters("abc"), 4)


@pytest.mark.parametrize("arguments", [(0, 0.5), (-3, 0.5), (8, 1.0), (8, -0.1), (8, float("nan"))])
def test_parameters_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="target|window"):
        AdaptiveChunker(*arguments)


def test_a_chunker_needs_its_one_method():
    with pytest.raises(TypeError, match="boundaries"):
        Chunker()
