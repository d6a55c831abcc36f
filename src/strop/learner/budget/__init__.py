"""The token budget of micro-batches, measured from memory."""
