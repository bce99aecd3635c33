"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("7 B", 7),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("512 MB", 512 * 10**6),
        (" 1.5KiB ", 1536),
        ("0.3 kB", 300),
        ("2TB", 2 * 10**12),
        ("1.0000000001 TiB", 2**40 + 109),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_exactly(text, expected):
    assert parse_bytes(text) == expected


BAD = ["", "GiB", "4 GiBs", "-4GiB", "4,5 GiB", "1e9", "4 G iB", ".5GB", "٤GB", None, 4.0, True]


@pytest.mark.parametrize("bad", BAD)
def test_anything_else_is_refused_with_an_example(bad):
    with pytest.raises(ValueError, match="write it as 4GiB"):
        parse_bytes(bad)


def test_negative_bytes_are_refused():
    with pytest.raises(ValueError, match="give 0 or more"):
        parse_bytes(-1)


@given(st.integers(0, 1 << 70), st.sampled_from(["", "KiB", "MiB", "GB"]))
def test_whole_numbers_of_any_size_lose_nothing(number, unit):
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")
