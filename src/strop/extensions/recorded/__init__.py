"""Training on recorded conversations and preferences: `strop sft`, `strop dpo` and `strop rm`."""
