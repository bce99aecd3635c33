"""When reuse pays: the formula of ``when-it-helps.md``, and the calculator that computes it in a browser."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

__all__ = ["Answer", "Case", "answer", "calculator"]

TEMPLATE = Path(__file__).parent / "calculator.html"


@dataclass(frozen=True)
class Case:
    """A pipeline, in numbers.

    Parameters
    ----------
    prefill_rate
        Prompt tokens a second of full prefill.
    ingest_ratio
        Throughput of indexing as a share of plain prefill's.
    ttft_ratio
        TTFT with reuse as a share of full prefill's.
    prompt_tokens
        Of a whole prompt.
    documents, document_tokens
        How many are indexed, and the tokens of one.
    documents_a_prompt
        How many a prompt holds.
    prompts_a_day
        How many are answered.
    layers, kv_heads, head_dim
        Of the model.
    bytes_a_number
        Of stored KV: 4 in float32, 2 in bfloat16, about 1 in int8.
    """

    prefill_rate: float
    ingest_ratio: float
    ttft_ratio: float
    prompt_tokens: float
    documents: float
    document_tokens: float
    documents_a_prompt: float
    prompts_a_day: float
    layers: float
    kv_heads: float
    head_dim: float
    bytes_a_number: float


@dataclass(frozen=True)
class Answer:
    """What a case comes to.

    Parameters
    ----------
    full_ttft, reuse_ttft
        Seconds to the first token.
    index_seconds
        To compute all documents' KV, once.
    uses
        How often a document has to be used until its KV has paid; infinite if reuse saves nothing.
    days
        Until the whole index has paid.
    kv_bytes_a_token
        Bytes of a token's keys and values.
    kv_gib
        All documents' KV, in GiB.
    """

    full_ttft: float
    reuse_ttft: float
    index_seconds: float
    uses: float
    days: float
    kv_bytes_a_token: float
    kv_gib: float


def answer(case: Case) -> Answer:
    """Compute when a case pays."""
    full = case.prompt_tokens / case.prefill_rate
    saved = full * (1 - case.ttft_ratio)
    index_of_one = case.document_tokens / (case.prefill_rate * case.ingest_ratio)
    bytes_a_token = 2 * case.layers * case.kv_heads * case.head_dim * case.bytes_a_number
    pays = saved > 0
    return Answer(
        full_ttft=full,
        reuse_ttft=full * case.ttft_ratio,
        index_seconds=case.documents * index_of_one,
        uses=index_of_one * case.documents_a_prompt / saved if pays else float("inf"),
        days=case.documents * index_of_one / (saved * case.prompts_a_day) if pays else float("inf"),
        kv_bytes_a_token=bytes_a_token,
        kv_gib=case.documents * case.document_tokens * bytes_a_token / 2**30,
    )


def calculator(case: Case) -> str:
    """Make the calculator's HTML, filled in with a case."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(asdict(case))
