"""Find registered documents in a prompt."""

from kvboost_rag.locate.locator import MIN_LENGTH, Locator

__all__ = ["MIN_LENGTH", "Locator"]
