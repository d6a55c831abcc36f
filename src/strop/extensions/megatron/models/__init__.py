"""Models of Megatron Core that read the flat rows of a batch: stages of a pipeline, and what they are made of."""
