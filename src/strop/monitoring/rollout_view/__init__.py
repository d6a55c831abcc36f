"""Stored rollouts for display: selection, and formatting as terminal text."""
