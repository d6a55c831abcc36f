"""What tests share: tiny models, a tiny tokenizer, builders of rollouts, an engine to ask, statistics."""
