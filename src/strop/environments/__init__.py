"""Environments: the tasks, prompts, turns and rewards that a policy is trained on."""
