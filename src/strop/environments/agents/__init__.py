"""Existing agents as environments."""
