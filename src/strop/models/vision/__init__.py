"""Images in prompts: their files, their placeholder tokens, and their vision tower features."""
