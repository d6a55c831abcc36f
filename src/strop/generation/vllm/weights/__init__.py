"""The weights of a vLLM model by canonical names: their names in vLLM, and reading them back from its layouts."""
