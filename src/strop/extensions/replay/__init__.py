"""``strop replay``: a step of a run again, from its checkpoint and what it trained on, as it was or under other settings."""
