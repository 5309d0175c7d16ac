"""Arguments of `swift rlhf` to a plan for Megatron (import tier 0: standard library only)."""

from __future__ import annotations

from .own import OWN_FIELDS, OwnField
from .plan import Plan
from .resolver import resolve

__all__ = ['OWN_FIELDS', 'OwnField', 'Plan', 'resolve']
