"""Serves the trained policy to existing agents."""
