"""What a policy is trained on: tasks, prompts, turns and rewards."""
