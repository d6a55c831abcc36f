"""The token budget of micro-batches, from measured memory."""
