"""The embedded engine: continuous batching on the learner's own Hugging Face module."""
