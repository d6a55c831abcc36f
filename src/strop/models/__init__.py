"""Hugging Face causal language models, as both the learner and the embedded engine run them."""
