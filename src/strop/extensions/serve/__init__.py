"""``strop serve``: a checkpoint behind OpenAI's HTTP API."""
