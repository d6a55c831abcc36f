"""``strop export``: checkpoints as folders that Transformers and vLLM load."""
