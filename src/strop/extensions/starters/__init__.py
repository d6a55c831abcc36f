"""``strop init``: small examples to begin with."""
