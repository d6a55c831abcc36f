"""vLLM as the generator: its asynchronous engine, in separate processes. Nothing outside this package imports vLLM."""
