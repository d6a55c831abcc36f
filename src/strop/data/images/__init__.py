"""A set of images that is drawn, without a download."""
