"""Context parallelism: ranks share the tokens of a micro-batch."""
