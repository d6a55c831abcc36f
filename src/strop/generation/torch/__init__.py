"""The embedded engine: continuous batching on the learner's Hugging Face module, or on a copy of it."""
