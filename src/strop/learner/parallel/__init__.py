"""Data, tensor, sequence, context and expert parallelism of one network."""
