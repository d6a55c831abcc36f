"""Engines whose kernels have weights of low precision."""
