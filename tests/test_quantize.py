"""Quantised KV: within the bound that its scale implies, smaller than native, never without number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.quantize import KV_DTYPES, KVFormat, dequantize, dequantize_into, quantize
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV, Quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS, HEADS, WIDTH = 2, 3, 8


def numbers(tokens: int, seed: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """``[layers, kv_heads, tokens, head_dim]`` of a kind that is hard on scale and offset."""
    x = torch.randn(LAYERS, HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    largest = torch.finfo(dtype).max
    if kind == "constant channels":
        x[..., ::2] = torch.tensor([3.3, -0.1, 250.7, 0.0])
    elif kind == "constant tokens":
        x[:, :, ::2] = x[:, :, ::2, :1]
    elif kind == "zeros":
        x.zero_()
    elif kind == "outlying channels":
        x[..., 1] = x[..., 1] * 5 + 90
    elif kind == "huge":
        x = x.sign() * x.abs().clamp(0.1, 4) * (largest / 17)
    elif kind == "tiny":
        x *= torch.finfo(dtype).smallest_normal
    elif kind == "one tiny layer":
        x[0] *= 1e-8
    return x.to(dtype)


KINDS = (
    "normal", "constant channels", "constant tokens", "zeros", "outlying channels", "huge", "tiny", "one tiny layer",
)  # fmt: skip


def step_of(q: Quantized) -> torch.Tensor:
    """Scale of every number behind the sinks, in float64."""
    tokens, groups = q.codes.shape[2], q.scale.shape[2]
    size = -(-tokens // groups)
    return q.scale.double().repeat_interleave(size, dim=2)[:, :, :tokens].expand(*q.shape[:2], tokens, q.shape[3])


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 70),
    seed=st.integers(0, 1 << 20),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([None, 1, 3, 32, 128]),
    sinks=st.integers(0, 5),
)
def test_limit_6_no_number_is_further_off_than_half_its_scale(tokens, seed, kind, dtype, bits, group, sinks):
    sinks = min(sinks, tokens - 1)
    x = numbers(tokens, seed, kind, dtype)
    q = quantize(x, bits, group, sinks)
    back = dequantize(q, 0, tokens)
    assert (q.shape, q.dtype, q.bits) == (x.shape, dtype, bits)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert back.isfinite().all()
    assert torch.equal(back[:, :, :sinks], x[:, :, :sinks])
    rest, step = x[:, :, sinks:].double(), step_of(q)
    # Rounding: once to float32 on the way there and back, then to the dtype.
    reach = rest.abs() + (2**bits - 1) * step
    rounding = reach * (torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps) + torch.finfo(dtype).tiny
    assert ((back[:, :, sinks:].double() - rest).abs() <= step / 2 + rounding).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 20), kind=st.sampled_from(KINDS), bits=st.sampled_from([8, 4]),
    group=st.sampled_from([None, 7, 128]),
)  # fmt: skip
def test_the_scale_is_no_larger_than_the_range_asks(seed, kind, bits, group):
    x = numbers(40, seed, kind, torch.float32)
    q = quantize(x, bits, group)
    parts = x.double().split(-(-40 // q.scale.shape[2]), dim=2)
    axis = 3 if group is None else 2
    low, high = (torch.cat([f(p, dim=axis, keepdim=True) for p in parts], dim=2) for f in (torch.amin, torch.amax))
    least = (high - low) / (2**bits - 1)
    eps = torch.finfo(q.scale.dtype).eps
    # The offset is one rounding below the smallest number, and the scale one above what it needs then.
    widest = least.amax(dim=(1, 2, 3), keepdim=True)
    assert (q.scale.double() <= least * (1 + 2 * eps) + low.abs() * 2 * eps + widest / 32).all()


def test_a_bound_of_half_the_scale_can_fail():
    x = numbers(40, 0, "normal", torch.float32)
    q = quantize(x, 4, 32)
    wrong = Quantized(q.first, q.codes, q.scale, q.offset + q.scale)
    assert ((dequantize(wrong, 0, 40).double() - x.double()).abs() > step_of(q) / 2 + 1e-3).any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 3, 128])
@pytest.mark.parametrize(("start", "end"), [(0, 20), (0, 1), (2, 5), (4, 6), (3, 20), (7, 8), (19, 20), (11, 13)])
def test_a_slice_is_the_slice_of_the_whole(bits, group, start, end):
    q = quantize(numbers(20, 1, "outlying channels", torch.float32), bits, group, sinks=4)
    assert torch.equal(dequantize(q, start, end), dequantize(q, 0, 20)[:, :, start:end])
    assert torch.equal(dequantize(q[1:], start, end), dequantize(q, 0, 20)[1:, :, start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_writes_into_a_view_and_leaves_the_rest_alone(dtype):
    q = quantize(numbers(20, 2, "normal", torch.float32), 4, 7, sinks=2)
    cache = torch.zeros(LAYERS, HEADS, 30, WIDTH, dtype=dtype)
    dequantize_into(cache[:, :, 5:25], q, 0, 20)
    assert torch.equal(cache[:, :, 5:25], dequantize(q, 0, 20).to(dtype))
    assert not cache[:, :, :5].any()
    assert not cache[:, :, 25:].any()


def test_what_was_never_quantised_is_a_view():
    x = numbers(20, 3, "normal", torch.float32)
    part = dequantize(x, 4, 9)
    assert torch.equal(part, x[:, :, 4:9])
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(("kind", "dtype", "wanted"), [
    ("normal", torch.float32, torch.float16),
    ("outlying channels", torch.bfloat16, torch.float16),
    ("one tiny layer", torch.float32, torch.float32),
    ("huge", torch.bfloat16, torch.float32),
    ("huge", torch.float16, torch.float16),
    ("tiny", torch.float32, torch.float32),
    ("zeros", torch.float32, torch.float16),
])  # fmt: skip
def test_scale_and_offset_are_halves_where_halves_can_hold_them(kind, dtype, wanted):
    for group in (None, 32):
        q = quantize(numbers(30, 4, kind, dtype), 8, group)
        assert (q.scale.dtype, q.offset.dtype) == (wanted, wanted)


def test_odd_channels_do_not_pack():
    x = torch.randn(1, 1, 4, 5)
    with pytest.raises(ValueError, match="use int8"):
        quantize(x, 4, 32)
    assert (dequantize(quantize(x, 8, 32), 0, 4) - x).abs().max() < 0.1


# Whole chunks --------------------------------------------------------------------------------------------------------


def entry_of(keys: torch.Tensor, values: torch.Tensor, index: int = 0) -> ChunkKV:
    tokens = keys.shape[2]
    chunk = Chunk(ChunkKey("p", "c"), "d", index, np.arange(tokens, dtype=np.int64))
    return ChunkKV(chunk, keys, values, torch.zeros(tokens))


def random_entry(tokens: int, dtype: torch.dtype = torch.float32, index: int = 0, layers: int = 30, width: int = 64):
    return entry_of(*(torch.randn(layers, 3, tokens, width).to(dtype) for _ in range(2)), index)


LIMITS = {("int8", 4): 0.27, ("int4", 4): 0.16, ("int8", 2): 0.53, ("int4", 2): 0.31}


@pytest.mark.parametrize("tokens", [90, 133, 170, 193, 256, 384])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_with_scales_and_sinks_stay_below_the_limits(tokens, kv_dtype, dtype):
    """Shapes of SmolLM2-135M, whose narrow heads make scales costly; the first chunk of a document, with its sinks."""
    entry = random_entry(tokens, dtype)
    stored = KVFormat(kv_dtype).stored(entry)
    real = sum(part.untyped_storage().nbytes() for x in (stored.keys, stored.values) for part in x.parts.values())
    assert stored.nbytes == real + tokens * (4 + 8)
    assert stored.nbytes <= LIMITS[kv_dtype, dtype.itemsize] * entry.nbytes
    assert stored.kv_dtype == kv_dtype


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_chunk_never_grows(kv_dtype, tokens, dtype):
    for width in (2, 64):
        entry = random_entry(tokens, dtype, layers=2, width=width)
        stored = KVFormat(kv_dtype).stored(entry)
        assert stored.nbytes <= entry.nbytes
        assert stored is entry or stored.nbytes < entry.nbytes


def test_keys_and_values_may_differ_in_width():
    stored = KVFormat("int8/int4").stored(random_entry(40, layers=2))
    assert (stored.keys.bits, stored.values.bits, stored.kv_dtype) == (8, 4, "int8/int4")
    assert stored.keys.scale.shape[2:] == (1, 64)
    assert stored.values.scale.shape[2:] == (40, 1)


def test_sinks_are_those_of_the_document():
    form = KVFormat("int8", sink_tokens=4)
    first, later = (form.stored(random_entry(40, index=i, layers=2)) for i in (0, 1))
    assert [x.first.shape[2] for e in (first, later) for x in (e.keys, e.values)] == [4, 4, 0, 0]
    assert form.stored(random_entry(4, layers=2)).kv_dtype == "native"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", [0, 1])
def test_what_has_no_safe_range_stays_native(odd, where):
    entry = random_entry(40, torch.bfloat16, layers=2)
    (entry.keys, entry.values)[where][1, 2, 30, 7] = odd
    assert KVFormat("int8").stored(entry) is entry


@pytest.mark.parametrize(("options", "words"), [
    ({"kv_dtype": "int2"}, "native, int8, int4, int8/int4"),
    ({"kv_dtype": "int8", "sink_tokens": -1}, ">= 0"),
    ({"sink_tokens": 4}, "leave it out"),
])  # fmt: skip
def test_a_format_that_can_not_be_meant_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        KVFormat(**options)


def test_names_are_equal_where_the_same_is_stored():
    assert KVFormat("int8").name == KVFormat("int8", KVFormat("int8").sinks).name
    names = {KVFormat(d, s).name for d in KV_DTYPES[1:] for s in (0, 4)} | {KVFormat().name}
    assert len(names) == 7
