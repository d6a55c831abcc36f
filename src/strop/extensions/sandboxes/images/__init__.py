"""Images: where they come from, and their layers unpacked without a daemon."""
