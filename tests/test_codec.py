"""The file form of chunks: it comes back as it was, and what does not fit the model is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from kvboost_rag.quantize import KV_DTYPES, KVFormat
from kvboost_rag.store.chunk_file import checksum
from kvboost_rag.store.codec import check_entry, entry_of, tensors_of
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV

SHAPE = (2, 3, 8)
TOKENS = 40


def made(kv_dtype: str = "int4", sink_tokens: int | None = 4, dtype: torch.dtype = torch.float32) -> ChunkKV:
    chunk = Chunk(ChunkKey("p", "c"), "d", 0, np.arange(TOKENS, dtype=np.int64))
    keys, values = (torch.randn(2, 3, TOKENS, 8).to(dtype) for _ in range(2))
    native = ChunkKV(chunk, keys, values, torch.rand(TOKENS))
    return KVFormat(kv_dtype, None if kv_dtype == "native" else sink_tokens).stored(native)


def through_a_file(entry: ChunkKV) -> ChunkKV:
    chunk = entry.chunk
    return entry_of(chunk.key, chunk.document_id, chunk.index, load(save(tensors_of(entry))))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("sink_tokens", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_comes_back_as_it_was(kv_dtype, sink_tokens, dtype):
    entry = made(kv_dtype, sink_tokens, dtype)
    back = through_a_file(entry)
    check_entry(back, SHAPE, dtype)
    assert (back.kv_dtype, back.nbytes) == (kv_dtype, entry.nbytes)
    tensors, again = tensors_of(entry), tensors_of(back)
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_the_names_say_what_is_quantised():
    native = {"keys", "values", "sensitivity", "token_ids"}
    assert set(tensors_of(made("native"))) == native
    parts = {f"{x}.{part}" for x in ("keys", "values") for part in ("first", "codes", "scale", "offset")}
    assert set(tensors_of(made("int8/int4"))) == parts | {"sensitivity", "token_ids"}


@pytest.mark.parametrize("name", ["keys.codes", "values.first", "values.scale", "keys.offset", "token_ids"])
def test_a_missing_part_is_a_key_error(name):
    entry = made()
    tensors = tensors_of(entry)
    del tensors[name]
    with pytest.raises(KeyError):
        entry_of(entry.chunk.key, "d", 0, tensors)


def changed(part: str, change) -> ChunkKV:
    entry = made()
    return replace(entry, keys=replace(entry.keys, **{part: change(getattr(entry.keys, part))}))


def with_number(x: torch.Tensor, number: float) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = number
    return x


@pytest.mark.parametrize(("part", "change"), [
    ("codes", lambda x: x[:, :, :-1]),
    ("codes", lambda x: x[..., :-1]),
    ("codes", lambda x: x[..., :1].expand(-1, -1, -1, 16)),
    ("codes", lambda x: x[:, :, :0]),
    ("codes", lambda x: x[0]),
    ("codes", lambda x: x.to(torch.int8)),
    ("codes", lambda x: x.float()),
    ("first", lambda x: x[:, :, :-1]),
    ("first", lambda x: x[..., :-1]),
    ("first", lambda x: x[:1]),
    ("first", lambda x: x.half()),
    ("first", lambda x: x[0]),
    ("first", lambda x: torch.zeros(2, 3, TOKENS, 8)),
    ("first", lambda x: torch.zeros(2, 3, TOKENS + 1, 8)),
    ("scale", lambda x: x[:, :, :-1]),
    ("scale", lambda x: x[:, :, :0]),
    ("scale", lambda x: torch.cat([x, x[:, :, :1]], dim=2)),
    ("scale", lambda x: x[..., :1]),
    ("scale", lambda x: x[..., :3]),
    ("scale", lambda x: x[:, :2]),
    ("scale", lambda x: x[0]),
    ("scale", lambda x: x.float()),
    ("scale", lambda x: x.to(torch.int16)),
    ("offset", lambda x: x.double()),
    ("offset", lambda x: x[:, :, :-1]),
    ("scale", lambda x: with_number(x, float("nan"))),
    ("scale", lambda x: with_number(x, float("inf"))),
    ("scale", lambda x: with_number(x, -0.01)),
    ("offset", lambda x: with_number(x, float("nan"))),
    ("offset", lambda x: with_number(x, -float("inf"))),
])  # fmt: skip
def test_a_crafted_part_is_refused(part, change):
    check_entry(changed(part, lambda x: x), SHAPE, torch.float32)
    with pytest.raises(ValueError, match="it"):
        check_entry(changed(part, change), SHAPE, torch.float32)


@pytest.mark.parametrize("groups", [7, 11, 36])
def test_groups_that_no_length_gives_are_refused(groups):
    """36 tokens are 6, 5 or 36 groups of one length and a shorter one, but not 7 or 11."""
    entry = made("int8")
    scale = torch.zeros(2, 3, groups, 8, dtype=torch.float16)
    crafted = replace(entry, keys=replace(entry.keys, scale=scale, offset=scale))
    if groups == 36:
        check_entry(crafted, SHAPE, torch.float32)
    else:
        with pytest.raises(ValueError, match="do not fit"):
            check_entry(crafted, SHAPE, torch.float32)


def test_numbers_beyond_the_dtype_are_refused():
    entry = made("int8")
    for dtype, scale in ((torch.float32, 3e38), (torch.float16, 300.0)):
        wide = replace(
            entry.keys,
            first=entry.keys.first.to(dtype),
            scale=torch.full_like(entry.keys.scale, scale, dtype=torch.float32),
            offset=entry.keys.offset.float(),
        )
        with pytest.raises(ValueError, match="lead"):
            check_entry(replace(entry, keys=wide, values=wide), SHAPE, dtype)


@pytest.mark.parametrize("shape", [(1, 3, 8), (2, 2, 8), (2, 3, 16), (2, 3, 4)])
def test_another_models_chunk_is_refused(shape):
    for kv_dtype in ("native", "int8", "int4"):
        with pytest.raises(ValueError, match="fit|not"):
            check_entry(made(kv_dtype), shape, torch.float32)
        with pytest.raises(ValueError, match="not"):
            check_entry(made(kv_dtype), SHAPE, torch.bfloat16)


def test_parts_keep_their_order_of_memory():
    entry = made("int8")
    codes = entry.keys.codes.transpose(2, 3).contiguous().transpose(2, 3)
    back = through_a_file(replace(entry, keys=replace(entry.keys, codes=codes)))
    assert torch.equal(back.keys.codes, entry.keys.codes)


def test_names_shapes_and_dtypes_are_under_the_checksum():
    x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    others = {"shape": {"x": x.reshape(4, 2)}, "dtype": {"x": x.view(torch.int32)}, "name": {"y": x}}
    sums = {checksum({}, tensors) for tensors in ({"x": x}, *others.values())}
    assert len(sums) == 4
