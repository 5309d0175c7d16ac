"""A stand-in for Transformer Engine in plain torch: the same classes and arguments, the same arithmetic, no fused kernel (tier 2)."""
