"""Attention of a flat row of tokens, whose plan decides which tokens attend to which."""
