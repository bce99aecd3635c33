"""Speed and quality of reuse against full prefill and prefix caching, on any question file."""

from kvboost_rag.bench.lengths import TimedPrompt, time_prompts
from kvboost_rag.bench.options import BASELINES, BenchOptions, add_arguments, options_from
from kvboost_rag.bench.run import run_bench
from kvboost_rag.bench.summary import format_table

__all__ = [
    "BASELINES", "BenchOptions", "TimedPrompt", "add_arguments", "format_table", "options_from", "run_bench",
    "time_prompts",
]  # fmt: skip
