"""Images in vLLM."""
