"""Weights of Megatron Core's models, read from and given as those of the ordinary Hugging Face model."""
