"""Datasets: where rows come from, how prompts are worded, and how batches are packed."""
