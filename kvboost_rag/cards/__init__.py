"""What objects show of themselves in a notebook: self-contained HTML without scripts, from plain values."""

from kvboost_rag.cards.answer import answer_card, report_card
from kvboost_rag.cards.measured import calibration_card, policy_card
from kvboost_rag.cards.stats import stats_card
from kvboost_rag.cards.strip import strip

__all__ = ["answer_card", "calibration_card", "policy_card", "report_card", "stats_card", "strip"]
