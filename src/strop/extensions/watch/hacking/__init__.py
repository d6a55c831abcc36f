"""Reward hacking, seen during training: detectors that watch rollouts for rewards without the skill that they should stand for."""
