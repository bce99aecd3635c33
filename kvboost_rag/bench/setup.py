"""The engine of a run, and what must be known to repeat it."""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import xxhash
from transformers import GenerationConfig

import kvboost_rag
from kvboost_rag.bench.methods import ANSWER_TOKENS, KEPT_PROMPTS
from kvboost_rag.bench.options import BenchOptions
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.repair import parse_repair
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Document

__all__ = ["build_engine", "describe", "ingest_rates"]

_RATE_DOCUMENTS = 16
_RATE_REPEATS = 3


def build_engine(options: BenchOptions) -> KVBoostEngine:
    """Load the model and make an engine that keeps no earlier prompts.

    Every method asks the same prompt, so one method would be served what another one computed. The canonical head is
    kept all the same. Of the model's generation config only the special tokens stay, so that each method's greedy
    decoding is the plain argmax (a repetition penalty, for one, would act on top of the logits that are compared).
    """
    engine = KVBoostEngine.from_pretrained(
        options.model,
        dtype=options.torch_dtype,
        device=options.device,
        layout=options.prompt_layout,
        context_documents=options.context_texts,
        policy=options.loaded_policy,
        kv_dtype=options.kv_dtype,
        sink_tokens=options.sink_tokens,
        max_prefix_bytes=0,
    )
    own = engine.model.generation_config
    make: Any = GenerationConfig
    engine.model.generation_config = make(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return engine


def describe(options: BenchOptions, engine: KVBoostEngine) -> dict[str, Any]:
    """Describe a run: model, options, machine and versions."""
    layout = options.prompt_layout
    return {
        "model": options.model_name,
        "fingerprint": engine.fingerprint,
        "context_key": engine.context_key,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kv_dtype": engine.kv_format.kv_dtype,
        "sink_tokens": engine.kv_format.sinks,
        "parameters": engine.model.num_parameters(),
        "attention": str(engine.model.config._attn_implementation),
        "engine": {
            "chat": layout.chat, "lead_in": layout.lead_in, "separator": layout.separator, "question": layout.question,
            "context_documents": len(options.context_texts), "max_prefix_bytes": 0,
            "context_digest": xxhash.xxh3_128_hexdigest("\0".join(options.context_texts).encode()),
        },
        "policy": engine.policy.source,
        "auto": {m: parse_repair(m, engine.policy).description for m in options.methods if m.startswith("auto")},
        "answer_tokens": ANSWER_TOKENS,
        "prefix_cache_prompts": KEPT_PROMPTS,
        "seed": options.seed,
        "options": options.as_json(),
        "data_digest": xxhash.xxh3_128_hexdigest(options.data.read_bytes()),
        "machine": _machine(engine),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "kvboost_rag": kvboost_rag.__version__,
        },
    }  # fmt: skip


def _machine(engine: KVBoostEngine) -> dict[str, Any]:
    device = engine.model.device
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(Path("/proc/cpuinfo")),
        "threads": torch.get_num_threads(),
        "device": accelerator or device.type,
    }


def _processor(cpuinfo: Path) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def ingest_rates(engine: KVBoostEngine, documents: Sequence[Document]) -> dict[str, Any]:
    """Compare ingest with the model's plain prefill of the same documents, each alone.

    Parameters
    ----------
    engine
        Knows none of them, and knows none of them afterwards.
    documents
        The first 16 that differ are taken.

    Returns
    -------
    dict[str, Any]
        ``documents``, ``tokens``, tokens a second of ``ingest`` and ``plain`` (median of three, in turns), and
        ``ratio``, ingest over plain.
    """
    chosen = list({d.id: d for d in documents}.values())[:_RATE_DOCUMENTS]
    ids = [torch.from_numpy(Tokens(engine.tokenizer).document(d.text.strip())) for d in chosen]
    tokens = sum(len(i) for i in ids)
    seconds: dict[str, list[float]] = {"ingest": [], "plain": []}
    _plain_prefill(engine, ids[:1])
    for _ in range(_RATE_REPEATS):
        seconds["ingest"].append(_timed(engine, lambda: engine.add_documents(chosen)))
        engine.remove_documents([d.id for d in chosen])
        seconds["plain"].append(_timed(engine, lambda: _plain_prefill(engine, ids)))
    rates = {name: tokens / median(values) for name, values in seconds.items()}
    return {"documents": len(chosen), "tokens": tokens, **rates, "ratio": rates["ingest"] / rates["plain"]}


@torch.inference_mode()
def _plain_prefill(engine: KVBoostEngine, ids: Sequence[torch.Tensor]) -> None:
    # Logits of the last token alone, as ingest computes none at all.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(engine.model.forward).parameters else {}
    for document in ids:
        engine.model(input_ids=document[None].to(engine.model.device), use_cache=True, **last_only)


def _timed(engine: KVBoostEngine, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    return time.perf_counter() - start
