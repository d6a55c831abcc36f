"""``strop serve --tinker``: training and sampling by the calls of the Tinker SDK."""
