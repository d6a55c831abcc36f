"""Batches divided into the shares of the ranks before transfer."""
