"""What can be seen of a replica's options before Ray and a process of its own are started to find out."""

from __future__ import annotations

from pathlib import Path

from kvboost_rag.loading import find_model
from kvboost_rag.owner import Owner
from kvboost_rag.quantize import KVFormat
from kvboost_rag.repair import parse_repair
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.store import StoreOptions, make_folder, redis_tier

__all__ = ["check_options"]


def check_options(options: ReplicaOptions, count: int, *, is_here: bool) -> None:
    """Refuse what each replica would refuse, in the same words.

    Parameters
    ----------
    options, count
        Of the replicas.
    is_here
        Whether the replicas run on this machine, so that its files, and what it reaches, are theirs.

    Raises
    ------
    ImportError
        If a package is missing.
    ValueError, OSError
        If an option can not be used.
    """
    if count < 1:
        raise ValueError(f"there would be {count} replicas; give 1 or more")
    engine = options.engine
    KVFormat(engine.get("kv_dtype", "native"), engine.get("sink_tokens"))
    if engine.get("repair") is not None:
        parse_repair(engine["repair"], engine.get("policy"))
    stores = StoreOptions(
        engine.get("max_memory_bytes"), cache_dir=engine.get("cache_dir"), max_disk_bytes=engine.get("max_disk_bytes"),
        read_only=engine.get("read_only", False), owner=Owner.of(engine.get("secret")),
        shared=redis_tier(engine.get("store")), trusted_only=engine.get("trusted_only", False),
    )  # fmt: skip
    if is_here:
        find_model(options.model)
        stores.check_shared()
        _check_folder(stores.folder)


def _check_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        make_folder(folder)
    except OSError as error:
        raise ValueError(f"cache folder {folder} can not be used ({error}); give a writable one") from error
