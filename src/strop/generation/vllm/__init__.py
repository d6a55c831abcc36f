"""vLLM as the generator: its asynchronous engine in processes of its own. Nothing outside this package imports vLLM."""
