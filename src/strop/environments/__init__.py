"""Environments: the tasks, prompts, turns and rewards used to train a policy."""
