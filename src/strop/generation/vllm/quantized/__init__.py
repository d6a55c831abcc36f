"""Engines with low-precision kernels."""
