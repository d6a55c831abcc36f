"""The PyTorch learner over Hugging Face models."""
