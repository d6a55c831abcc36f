"""Families of models: from a Hugging Face configuration to Megatron Core's, and where each weight is."""
