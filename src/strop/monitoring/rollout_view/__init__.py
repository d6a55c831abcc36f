"""Stored rollouts for people: which to show, and as text for a terminal."""
