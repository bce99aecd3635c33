"""Keys and values in 8 or 4 bits: asymmetric, with a scale and an offset for every group of numbers.

Keys have channels that are large in every token, values do not: keys share a scale along the tokens, channel by
channel, values along the channels, token by token. Keys come without rotation, which would mix the channels. Method:
KIVI, https://arxiv.org/abs/2402.02750.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvboost_rag.types import ChunkKV, Quantized

__all__ = ["KV_DTYPES", "SINK_TOKENS", "KVFormat", "dequantize", "dequantize_into", "quantize"]

KV_DTYPES = ("native", "int8", "int4", "int8/int4")
"""Names of what keys and values are stored as; with a slash where they differ."""

SINK_TOKENS = 0
"""First tokens of a document that stay native unless asked otherwise.

None: behind the canonical head no document begins with an attention sink. With SmolLM2-135M, 4 or 16 native tokens
changed the KL to full prefill by less than .002 in every form, mostly for the worse, and 4 of 170 alone take int8 from
.26 to .28 of float32.
"""

_BITS = {"int8": 8, "int4": 4}
# About so many tokens share a channel's scale. Fewer are more precise and take more bytes.
_KEY_GROUP = {8: 128, 4: 32}
# The smallest scale, as the largest of its layer, that float16 holds without making it more than 2 % larger.
_SMALLEST_HALF = 2.0**-18
_LARGEST_HALF = 2.0**15


@dataclass(frozen=True)
class KVFormat:
    """How documents' KV is stored.

    Parameters
    ----------
    kv_dtype
        One of :data:`KV_DTYPES`.
    sink_tokens
        How many first tokens of each document stay native; None for :data:`SINK_TOKENS`.

    Raises
    ------
    ValueError
        For a name that is not known, and for sinks below zero or without use.
    """

    kv_dtype: str = "native"
    sink_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can not be meant."""
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; pass one of {', '.join(KV_DTYPES)}")
        if self.sinks < 0:
            raise ValueError(f"sink_tokens is {self.sink_tokens}; pass a number of tokens >= 0")
        if self.kv_dtype == "native" and self.sink_tokens is not None:
            raise ValueError("sink_tokens has no use with kv_dtype='native', where every token is; leave it out")

    @property
    def sinks(self) -> int:
        """How many first tokens of each document stay native among others that do not."""
        if self.kv_dtype == "native":
            return 0
        return SINK_TOKENS if self.sink_tokens is None else self.sink_tokens

    @property
    def name(self) -> str:
        """Equal for formats that store the same."""
        return "native" if self.kv_dtype == "native" else f"{self.kv_dtype} behind {self.sinks} native tokens"

    def stored(self, entry: ChunkKV) -> ChunkKV:
        """Quantise a chunk, unless it would not become smaller or holds numbers at the end of its dtype's range.

        Parameters
        ----------
        entry
            With native keys and values.
        """
        if self.kv_dtype == "native" or not isinstance(entry.keys, Tensor) or not isinstance(entry.values, Tensor):
            return entry
        sinks = self.sinks if entry.chunk.index == 0 else 0
        if len(entry.chunk.token_ids) <= sinks or not (_is_safe(entry.keys) and _is_safe(entry.values)):
            return entry
        keys, _, values = self.kv_dtype.partition("/")
        bits = _BITS[keys], _BITS[values or keys]
        smaller = replace(
            entry,
            keys=quantize(entry.keys, bits[0], _KEY_GROUP[bits[0]], sinks),
            values=quantize(entry.values, bits[1], None, sinks),
        )
        return smaller if smaller.nbytes < entry.nbytes else entry


def _is_safe(x: Tensor) -> bool:
    """Whether all numbers are finite, and stay so when their range is widened a little."""
    return bool(x.abs().amax() <= torch.finfo(x.dtype).max / 4)


def quantize(x: Tensor, bits: int, group: int | None, sinks: int = 0) -> Quantized:
    """Quantise keys or values.

    Parameters
    ----------
    x
        ``[layers, kv_heads, tokens, head_dim]``, any float dtype, finite and below a quarter of its largest number;
        more than ``sinks`` tokens, and an even ``head_dim`` for 4 bits.
    bits
        8 or 4.
    group
        About so many tokens share the scale of a channel; None for a scale of each token over all channels.
    sinks
        How many first tokens stay as they are.

    Returns
    -------
    Quantized
        Each number within half its scale (and the rounding of the dtype) of what it was.
    """
    if bits == 4 and x.shape[3] % 2:
        raise ValueError(f"int4 packs two channels to a byte, but head_dim is {x.shape[3]}; use int8")
    levels = 2**bits - 1
    rest = x[:, :, sinks:].float()
    size = 1 if group is None else group_size(rest.shape[2], max(1, round(rest.shape[2] / group)))
    scale, offset = _parameters(*_extremes(rest, None if group is None else size), levels)
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=x.device)
    step = torch.where(scale > 0, scale, 1).float()
    for tokens, groups in _aligned(0, rest.shape[2], size):
        code = (rest[:, :, tokens] - offset[:, :, groups].float()) / step[:, :, groups]
        codes[:, :, tokens] = code.round_().clamp_(0, levels)
    return Quantized(x[:, :, :sinks].clone(), codes if bits == 8 else _packed(codes), scale, offset)


def group_size(tokens: int, groups: int) -> int:
    """Tokens of all groups but the last, which may have fewer."""
    return -(-tokens // groups)


def _aligned(start: int, end: int, size: int) -> list[tuple[slice, slice]]:
    """Cut ``start`` to ``end`` into runs of tokens, each with the groups it goes with."""
    if size == 1:
        return [(slice(start, end), slice(start, end))]
    firsts = range(start // size, -(-end // size))
    return [(slice(max(start, g * size), min(end, (g + 1) * size)), slice(g, g + 1)) for g in firsts]


def _extremes(x: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of every group, in float64."""
    if size is None:
        low, high = x.amin(dim=3, keepdim=True), x.amax(dim=3, keepdim=True)
    else:
        parts = [x[:, :, first : first + size] for first in range(0, x.shape[2], size)]
        low = torch.stack([part.amin(dim=2) for part in parts], dim=2)
        high = torch.stack([part.amax(dim=2) for part in parts], dim=2)
    return low.double(), high.double()


def _parameters(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and offset such that the codes 0 to ``levels`` reach from ``low`` to ``high``, or a little further."""
    largest = (high - low).amax(dim=(1, 2, 3)) / levels
    fits = ((largest == 0) | (largest >= _SMALLEST_HALF)).all() and max(high.max(), -low.min()) <= _LARGEST_HALF
    dtype = torch.float16 if fits else torch.float32
    offset = _rounded_down(low, dtype)
    return _rounded_down((offset.double() - high) / levels, dtype).abs(), offset


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float64 to a number of ``dtype`` that is not larger."""
    near = x.to(dtype)
    info = torch.finfo(dtype)
    # One to two steps of its exponent down, or the smallest step of all.
    below = (near.double() - near.double().abs() * info.eps - info.smallest_normal * info.eps).to(dtype)
    return torch.where(near.double() > x, below, near)


def _packed(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, dim=3)
    return low | (high << 4)


def dequantize(x: Tensor | Quantized, start: int, end: int, dtype: torch.dtype | None = None) -> Tensor:
    """Give back native keys or values.

    Parameters
    ----------
    x
        ``[layers, kv_heads, tokens, head_dim]``.
    start, end
        Which tokens.
    dtype
        Of what was quantised; None for the native one.

    Returns
    -------
    Tensor
        ``[layers, kv_heads, end - start, head_dim]``; a view of what was never quantised.
    """
    if isinstance(x, Tensor):
        return x[:, :, start:end]
    shape = (*x.shape[:2], end - start, x.shape[3])
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.codes.device)
    dequantize_into(out, x, start, end)
    return out


def dequantize_into(out: Tensor, x: Tensor | Quantized, start: int, end: int) -> None:
    """Write :func:`dequantize` to ``out`` (the same shape, any float dtype, possibly a view into a KV cache)."""
    if isinstance(x, Tensor):
        out.copy_(x[:, :, start:end])
        return
    sinks = x.first.shape[2]
    kept = max(0, min(end, sinks) - start)
    out[:, :, :kept] = x.first[:, :, start : start + kept]
    if end > sinks:
        _expand(out[:, :, kept:], x, max(0, start - sinks), end - sinks)


def _expand(out: Tensor, x: Quantized, start: int, end: int) -> None:
    """Write tokens ``start`` to ``end``, counted behind the sinks."""
    work = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    codes = x.codes[:, :, start:end]
    if x.bits == 8:
        work.copy_(codes)
    else:
        low, high = work.chunk(2, dim=3)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
    scale, offset = x.scale.float(), x.offset.float()
    for tokens, groups in _aligned(start, end, group_size(x.codes.shape[2], x.scale.shape[2])):
        part = work[:, :, tokens.start - start : tokens.stop - start]
        part.mul_(scale[:, :, groups]).add_(offset[:, :, groups])
    if work is not out:
        out.copy_(work)
