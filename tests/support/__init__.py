"""Shared test helpers: tiny models, a tiny tokenizer, rollout builders, engines, statistics."""
