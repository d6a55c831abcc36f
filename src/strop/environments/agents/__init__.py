"""Agents that were written elsewhere, as environments."""
