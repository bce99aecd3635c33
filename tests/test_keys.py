from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost_rag.keys import chain, content_key, fingerprint_of, prefix_seed

# A busy machine must not fail a test.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(lambda items: np.array(items, dtype=np.int64))
names = st.text(max_size=6)

KEYS = """
import numpy as np
from kvboost_rag.keys import *
f = fingerprint_of({"weights": "w", "dtype": "float32", "adapter": ""})
print(f, prefix_seed(f), chain(prefix_seed(f), np.arange(5)), content_key(f, np.arange(5)))
"""
# Written down so that a change of the scheme, which invalidates every store on disk, is made on purpose.
EXPECTED = """
652c31d9bb9f6d587eef4fd4fddeb381
650f095ea087e92b44cf96996eacb2b6
a2391336ba05d340e701987400eceb46
cf9d9589523e62ddc742eb3f204fbec3
"""


def in_process(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", KEYS], env=env, capture_output=True, text=True, check=True).stdout


def test_keys_are_the_same_in_every_process():
    assert in_process("0").split() == in_process("4711").split() == EXPECTED.split()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "<i8", ">i8"])
def test_dtype_and_byte_order_do_not_matter(dtype):
    seed = prefix_seed("f")
    values = [0, 3, 120]
    assert content_key("f", np.array(values, dtype=dtype)) == content_key("f", np.array(values, dtype=np.int64))
    assert chain(seed, np.array(values, dtype=dtype)) == chain(seed, np.array(values, dtype=np.int64))


def test_memory_layout_does_not_matter():
    table = np.arange(12, dtype=np.int64).reshape(4, 3)
    assert content_key("f", table[:, 1]) == content_key("f", table[:, 1].copy())
    assert content_key("f", table[::-1, 0]) == content_key("f", table[::-1, 0].copy())


@relaxed
@given(ids, ids)
def test_different_tokens_have_different_keys(first, second):
    same = first.tolist() == second.tolist()
    assert (content_key("f", first) == content_key("f", second)) is same
    assert (chain(prefix_seed("f"), first) == chain(prefix_seed("f"), second)) is same


@relaxed
@given(st.text(), st.text())
def test_different_fingerprints_have_different_keys(first, second):
    assert (prefix_seed(first) == prefix_seed(second)) is (first == second)
    assert (content_key(first, np.arange(3)) == content_key(second, np.arange(3))) is (first == second)


def test_a_chain_depends_on_what_came_before_and_on_the_boundaries():
    seed, tokens = prefix_seed("f"), np.array([1, 2], dtype=np.int64)
    whole, parts = chain(seed, tokens), chain(chain(seed, tokens[:1]), tokens[1:])
    assert len({seed, whole, parts, chain(prefix_seed("g"), tokens), chain(seed, tokens[:0])}) == 5


def test_kinds_of_key_differ_even_where_their_contents_are_the_same_bytes():
    # Each pair hashes the same bytes apart from the tag.
    none, zero = np.arange(0), np.zeros(1, dtype=np.int64)
    length = (8).to_bytes(8, "little")
    assert chain((length + b"12345678").hex(), zero) != content_key("12345678", zero)
    assert fingerprint_of({"f": ""}) != content_key("f", none)
    text = "12345678" + "\x01" + "\0" * 7 + "\0" * 8
    assert prefix_seed(text) != chain(((24).to_bytes(8, "little") + b"12345678").hex(), zero)


def test_keys_are_32_hexadecimal_digits():
    for key in (fingerprint_of({"a": "b"}), prefix_seed("f"), content_key("f", np.arange(3))):
        assert len(key) == 32 and int(key, 16) >= 0


@relaxed
@given(st.dictionaries(names, names, min_size=1), st.dictionaries(names, names, min_size=1))
def test_fingerprints_are_equal_only_for_equal_parts(first, second):
    assert (fingerprint_of(first) == fingerprint_of(second)) is (first == second)


@relaxed
@given(st.dictionaries(names, names, min_size=1))
def test_order_of_parts_does_not_matter(parts):
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))


def test_moving_a_character_between_parts_changes_the_fingerprint():
    variants = [{"a": "bc", "d": "e"}, {"ab": "c", "d": "e"}, {"a": "b", "d": "ce"}, {"a": "bcd", "": "e"}]
    assert len({fingerprint_of(parts) for parts in variants}) == len(variants)


def test_lone_surrogates_have_keys():
    assert prefix_seed("\ud800") != prefix_seed("\udc00")


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), dtype=np.int64), np.array([1.0]), np.array([1], dtype=np.uint64)])
def test_what_is_no_vector_of_token_ids_is_refused(tokens):
    with pytest.raises(ValueError, match="numpy.int64"):
        content_key("f", tokens)
    with pytest.raises(ValueError, match="numpy.int64"):
        chain(prefix_seed("f"), tokens)


@pytest.mark.parametrize("previous", ["", "f", "no hex", "ab" * 15])
def test_what_is_no_prefix_key_is_refused(previous):
    with pytest.raises(ValueError, match="prefix_seed"):
        chain(previous, np.arange(3))


def test_a_fingerprint_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        fingerprint_of({})
