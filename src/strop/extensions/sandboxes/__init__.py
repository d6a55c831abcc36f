"""Sandboxes from images: one protocol, several providers (docs/sandboxes.md)."""
