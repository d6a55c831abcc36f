"""Environments that were written for other libraries, as they are."""
