"""Gathers the weights of a sharded network for engines."""
