"""Recipes of models that see and hear."""
