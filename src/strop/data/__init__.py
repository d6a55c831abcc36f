"""Datasets: sources of rows, prompt templates, recorded data, and the packing of batches."""
