"""Stored rollouts for people: which to show, as text for a terminal, and as one HTML page."""
