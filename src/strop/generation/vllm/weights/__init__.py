"""The weights of a vLLM model by their canonical names: how they are named to vLLM, and read back out of its layouts."""
