"""Stored rollouts by their scalars: which are there, found without reading what was said."""
