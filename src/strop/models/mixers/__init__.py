"""Sequence mixers other than attention: short convolutions, delta rules and state spaces over a tree of segments; and indexers."""
