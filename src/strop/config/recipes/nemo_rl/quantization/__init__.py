"""Low precision in NeMo-RL's recipes."""
