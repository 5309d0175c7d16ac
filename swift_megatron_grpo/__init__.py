"""GRPO on Megatron-Core for the people who use ms-swift (import tier 0: standard library only)."""

__version__ = '0.1.0'
