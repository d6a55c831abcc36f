"""Fake quantisation of the learner (``policy.quant_cfg``): its linear layers compute with rounded weights and inputs (docs/fp8.md)."""
