"""Strop post-trains language models: reinforcement learning first, with what comes before and around it."""

__version__ = "0.1.0"
