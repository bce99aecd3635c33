"""Fuzz the reader of chunk files: whatever a file holds, it is a chunk that fits the model, or refused as damaged.

``python tests/fuzz_reader.py SECONDS [options of libFuzzer]``; prints how often it ran, and ends with another status
than 0, leaving what led there, for any exception that is no damage, for KV that is no number, and for too much memory
or time. Needs ``atheris``.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import atheris
import torch
from safetensors.torch import save

with atheris.instrument_imports(include=["kvboost_rag.reading", "kvboost_rag.store"]):
    from disk_chunks import DTYPE, IDENTITY, SHAPE, make_chunk

    from kvboost_rag.quantize import KVFormat, dequantize
    from kvboost_rag.store import DiskStore
    from kvboost_rag.store.chunk_file import checksum, serialise
    from kvboost_rag.store.codec import most_bytes, tensors_of
    from kvboost_rag.store.header import DAMAGE, FORMAT, LONGEST_HEADER, read_header
    from kvboost_rag.store.layout import chunk_path

TOKENS = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float64)
NATIVE = make_chunk(1, tokens=TOKENS)
ENTRIES = [NATIVE] + [KVFormat(kind, 4).stored(NATIVE) for kind in ("int8", "int4", "int8/int4")]
FILES = [serialise(entry, IDENTITY) for entry in ENTRIES]


def split(whole: bytes) -> tuple[bytes, bytes]:
    """Header and tensors of a file."""
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    return whole[8:end], whole[end:]


def as_it_comes(data: bytes) -> bytes:
    """Take all of the file."""
    return data


def with_header(data: bytes) -> bytes:
    """Take the header alone, with the length that it has; the tensors are a sound file's."""
    body = split(FILES[data[0] % len(FILES)])[1] if data else b""
    return struct.pack("<Q", len(data[1:])) + data[1:] + body


def with_checksum(data: bytes) -> bytes:
    """Take shapes, dtypes, numbers and metadata; the file is whole and its checksum right."""
    choose = atheris.FuzzedDataProvider(data)
    entry = ENTRIES[choose.ConsumeIntInRange(0, len(ENTRIES) - 1)]
    tensors = tensors_of(entry)
    for _ in range(choose.ConsumeIntInRange(0, 3)):
        name = choose.PickValueInList(sorted(tensors))
        tensors[name] = changed(tensors[name], choose)
    meta = {
        "format": FORMAT, "identity": IDENTITY, "prefix": NATIVE.chunk.key.prefix, "content": NATIVE.chunk.key.content,
        "document_id": "d", "index": "0", "tokens": str(TOKENS),
    }  # fmt: skip
    if choose.ConsumeBool():
        meta[choose.PickValueInList(sorted(meta))] = choose.ConsumeUnicodeNoSurrogates(12)
    return save(tensors, metadata={**meta, "checksum": checksum(meta, tensors)})


def changed(tensor: torch.Tensor, choose: atheris.FuzzedDataProvider) -> torch.Tensor:
    """Give a tensor another dtype, shape or number."""
    how = choose.ConsumeIntInRange(0, 3)
    if how == 0:
        return tensor.to(choose.PickValueInList(list(DTYPES)))
    if how == 1:
        shape = [choose.ConsumeIntInRange(0, 9) for _ in range(choose.ConsumeIntInRange(0, 5))]
        return torch.zeros(shape, dtype=tensor.dtype)
    if how == 2 and tensor.ndim:
        axis = choose.ConsumeIntInRange(0, tensor.ndim - 1)
        return tensor.narrow(axis, 0, tensor.shape[axis] // 2).contiguous()
    tensor = tensor.clone()
    if tensor.numel():
        number = torch.tensor(choose.ConsumeFloat(), dtype=torch.float64)
        tensor.view(-1)[choose.ConsumeIntInRange(0, tensor.numel() - 1)] = number
    return tensor


MAKERS = (as_it_comes, with_header, with_checksum)


class Reader:
    """Reads what a maker made of the fuzzer's bytes, as a store does."""

    def __init__(self, folder: Path) -> None:
        self._store = DiskStore(folder, IDENTITY, SHAPE, DTYPE)
        self._path = chunk_path(folder, IDENTITY, NATIVE.chunk.key.prefix)

    def __call__(self, data: bytes) -> None:
        """Read one file."""
        self.read(data)

    def read(self, data: bytes) -> bool:
        """Read one file; False if it is refused."""
        if not data:
            return False
        self._path.write_bytes(MAKERS[data[0] % len(MAKERS)](data[1:]))
        try:
            read_header(self._path)
            entry = self._store._read(self._path, TOKENS)
        except (OSError, *DAMAGE):
            return False
        assert entry.nbytes <= LONGEST_HEADER + most_bytes(SHAPE, DTYPE, TOKENS)
        for x in (entry.keys, entry.values):
            assert torch.isfinite(dequantize(x, 0, len(entry.chunk.token_ids), torch.float32)).all()
        assert (entry.sensitivity >= 0).all() and torch.isfinite(entry.sensitivity).all()
        return True


def seeds() -> list[bytes]:
    """What the fuzzer begins with: sound files, for every maker."""
    made = []
    for number, whole in enumerate(FILES):
        header, _ = split(whole)
        made += [b"\0" + whole, bytes([1, number]) + header, b"\2" + bytes(16) + bytes([number])]
    return made


def main() -> None:
    """Fuzz for the seconds of the first argument."""
    seconds, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as corpus:
        reader = Reader(Path(folder))
        for number, seed in enumerate(seeds()):
            # One that refuses everything would find nothing.
            assert reader.read(seed), number
            Path(corpus, str(number)).write_bytes(seed)
        limits = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=20000", "-len_control=0", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", *limits, *options, corpus], reader)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
