from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvboost_rag.decode import Detokenizer, StopMatcher

CORPUS = [
    "The quick brown fox's tail isn't long , is it ?",
    "naïve café 中文字符 日本語 😀😃 👩‍👩‍👧 Ελληνικά",
    "  a  b\n\n\tc",
] * 3


CROSSING = "Ńä¸"


def byte_level() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    raw.train_from_iterator(CORPUS, trainer)
    # Begins with the end of one 中 and ends inside the next.
    raw.add_tokens(["<plain>", CROSSING])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama's layout: byte fallback, a leading space that the decoder strips."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁a", "▁the", "a", "b", "é", "中", ".", "▁.", "\n", "\ufffd", "▁\ufffd"]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def metaspace() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "</s>", "▁", "▁a", "▁the", "a", "b", "▁▁", ".", "é", "中"]
    raw = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


def wordpiece(cleanup: bool) -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[SEP]", *"abcdefghijkmnrstv", "re", "ve", "##s", "##re", "##n", "'", ".", ",", "!", "?", "##'"]
    raw = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", eos_token="[SEP]", clean_up_tokenization_spaces=cleanup
    )


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": metaspace(),
    "wordpiece": wordpiece(False),
    "wordpiece_cleaned": wordpiece(True),
}
BYTES = TOKENIZERS["byte_level"]


def ids_of_bytes(values):
    """One token a byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    chars = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [BYTES.convert_tokens_to_ids(chars[value]) for value in values]


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_full_decode(name):
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    @example([])
    @example(list(range(len(tokenizer))))
    def check(ids):
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)

    check()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(alphabet="中文😀👩‍é \n\ufffda", max_size=30))
def test_text_comes_back(first, second):
    ids = BYTES.encode(first + second, add_special_tokens=False)
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0xC3, 0xA9, 0xFF, 0xEF, 0xBF, 0xBD, 0x41]), max_size=80))
@example([0xE2] * 60 + [0x82, 0xAC])
@example([0xF0, 0x9F, 0x98] * 20 + [0x80, 0x41])
@example([0xC3, 0xFF, 0xF0, 0x9F, 0xE2, 0x82] * 12)
def test_broken_bytes_come_out_as_from_the_full_decode(values):
    ids = ids_of_bytes(bytes(values))
    assert "".join(pieces_of(BYTES, ids)) == bytes(values).decode("utf-8", errors="replace")


def test_a_character_is_shown_whole_and_at_once():
    ids = ids_of_bytes("a😁b".encode())
    assert pieces_of(BYTES, ids) == ["a", "", "", "", "😁", "b", ""]


def test_a_broken_end_is_shown_at_the_end():
    ids = ids_of_bytes(b"a\xf0\x9f")
    assert pieces_of(BYTES, ids) == ["a", "", "", "\ufffd"]


def test_leading_space_of_later_tokens_stays():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(["▁the", "</s>", "▁a", "b", "▁."])
    assert pieces_of(tokenizer, ids) == ["the", "", " a", "b", " .", ""]


def test_byte_tokens_wait_for_the_end_of_their_run():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>", "▁a"])
    assert pieces_of(tokenizer, ids) == ["", "", "", "中 a", ""]


def test_clean_up_sees_across_tokens():
    tokenizer = TOKENIZERS["wordpiece_cleaned"]
    ids = tokenizer.convert_tokens_to_ids(["a", "n", "'", "t", "."])
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) != TOKENIZERS["wordpiece"].decode(ids)


class CountingTokenizer(PreTrainedTokenizerFast):
    """The real thing, and it counts the ids it decodes."""

    most = 0

    def decode(self, token_ids, **kwargs):
        CountingTokenizer.most = max(CountingTokenizer.most, len(token_ids))
        return super().decode(token_ids, **kwargs)


def test_tokens_that_never_end_with_a_character():
    ids = [*ids_of_bytes("中".encode()[:2]), *[BYTES.convert_tokens_to_ids(CROSSING)] * 60]
    assert pieces_of(BYTES, ids) == ["", "", *["中"] * 60, "\ufffd"]


@pytest.mark.parametrize("values", [b"a long answer ", "中".encode(), b"\xff", b"\xe2", b"\xf0\x9f"])
def test_work_per_token_does_not_grow(values):
    tokenizer = CountingTokenizer(tokenizer_object=BYTES.backend_tokenizer)
    ids = ids_of_bytes(values)
    detokenizer = Detokenizer(tokenizer)
    CountingTokenizer.most = 0
    for token_id in ids * (600 // len(ids)):
        detokenizer.push(token_id)
    assert 0 < CountingTokenizer.most <= 24


def run_matcher(stops, pieces):
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return text, matcher.hit


def slow_cut(stops, text):
    """Let the text grow by a character at a time."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3, unique=True),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_stop_strings_whatever_the_pieces(stops, pieces):
    assert run_matcher(tuple(stops), pieces) == slow_cut(stops, "".join(pieces))


def test_text_is_held_back_no_longer_than_needed():
    matcher = StopMatcher(("\nUser:", "END"))
    assert [matcher.push(piece) for piece in ("hi\nUs", "x E", "N", "N", "d")] == ["hi", "\nUsx ", "", "ENN", "d"]
    assert matcher.push("E") == ""
    assert matcher.flush() == "E"
    assert matcher.hit is None


def test_nothing_comes_after_a_hit():
    matcher = StopMatcher(("END", "ND"))
    assert [matcher.push("aEN"), matcher.push("D tail"), matcher.push("more"), matcher.flush()] == ["a", "", "", ""]
    assert matcher.hit == "END"
