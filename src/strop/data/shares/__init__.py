"""Batches divided into the share of each rank before they travel."""
