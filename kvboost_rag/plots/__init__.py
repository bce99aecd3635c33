"""Pictures of measurements, each drawn from what was measured; needs the extra ``plots`` (matplotlib)."""

from kvboost_rag.plots.budget import hit_rate
from kvboost_rag.plots.frontier import frontier
from kvboost_rag.plots.heatmap import deviation
from kvboost_rag.plots.style import Plot, require
from kvboost_rag.plots.ttft import stages, ttft_by_tokens

__all__ = ["Plot", "deviation", "frontier", "hit_rate", "require", "stages", "ttft_by_tokens"]
