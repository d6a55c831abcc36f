"""Images in prompts: their files, the tokens that stand for them, and what the vision tower makes of them."""
