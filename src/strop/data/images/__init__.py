"""A set of drawn images, which needs no download."""
