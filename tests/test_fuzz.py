"""Fuzzing of files that others may write; of prompts in ``test_forgery``, of the locator in ``test_locate``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from disk_chunks import make_chunk, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_disk_faults import crafted, file_of, header_of, open_store

from kvboost_rag.quantize import KVFormat
from kvboost_rag.store.chunk_file import serialise
from kvboost_rag.store.file_index import FileIndex

FUZZER = Path(__file__).parent / "fuzz_reader.py"
SECONDS = 6
TOKENS = 64
NATIVE = make_chunk(1, tokens=TOKENS)
ENTRIES = [NATIVE, KVFormat("int4", 4).stored(NATIVE)]


def test_the_reader_withstands_a_fuzzer(tmp_path):
    """The same for longer: ``make fuzz SECONDS=3600``."""
    if find_spec("atheris") is None:
        pytest.skip("the fuzzer is missing: pip install atheris")
    command = [sys.executable, FUZZER, str(SECONDS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(re.search(r"number_of_executed_units: (\d+)", done.stderr)[1]) > 100


numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none())
names = st.one_of(st.sampled_from(["dtype", "shape", "data_offsets", "keys", "__metadata__"]), st.text(max_size=5))
values = st.recursive(
    st.one_of(numbers, st.text(max_size=8), st.sampled_from(["F32", "I64", "U8"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(tmp_path_factory.mktemp("headers"))


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data(), entry=st.sampled_from(ENTRIES))
def test_a_header_with_anything_in_it_is_right_or_refused(store, data, entry):
    whole = serialise(entry, store._identity)
    header, body = header_of(whole), whole[8 + int.from_bytes(whole[:8], "little") :]
    for _ in range(data.draw(st.integers(1, 2))):
        part = header
        while data.draw(st.booleans()) and (inner := [v for v in part.values() if isinstance(v, dict)]):
            part = data.draw(st.sampled_from(inner))
        part[data.draw(st.one_of(st.sampled_from(sorted(part) or ['keys']), names))] = data.draw(values)
    path = file_of(store._folder, entry)
    path.unlink(missing_ok=True)
    path.write_bytes(crafted(json.dumps(header).encode(), body))
    store._index = FileIndex(store._folder, store._identity)
    found = store.get(entry.chunk.key.prefix, entry.chunk.token_ids)
    assert found is None or same(found, entry)
    assert (found is not None) <= (entry.chunk.key.prefix in store)


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=300), length=st.integers(0, 300))
def test_any_bytes_are_refused(store, content, length):
    entry = ENTRIES[0]
    path = file_of(store._folder, entry)
    path.unlink(missing_ok=True)
    path.write_bytes(length.to_bytes(8, "little") + content)
    store._index = FileIndex(store._folder, store._identity)
    assert store.get(entry.chunk.key.prefix, entry.chunk.token_ids) is None
