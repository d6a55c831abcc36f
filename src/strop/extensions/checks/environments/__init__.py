"""``strop env check``: what is wrong with an environment, found without a model."""
