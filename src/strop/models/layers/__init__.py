"""Decoder layers with fewer passes over memory than the modules of Transformers, and the same rounding."""
