"""Selectors: which rows after an edit are recomputed besides the edited span itself."""

from kvfix.selectors.base import Budget, SelectionContext, Selector, largest_plan, make_plan
from kvfix.selectors.registry import SELECTORS, get_selector

__all__ = ["SELECTORS", "Budget", "SelectionContext", "Selector", "get_selector", "largest_plan", "make_plan"]
