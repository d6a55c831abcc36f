"""Passes over micro-batches: rows for the stages, Megatron Core's pipeline schedules, and log-probabilities from the last stage."""
