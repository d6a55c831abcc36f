"""Hugging Face models, as the learner and the PyTorch engine run them."""
