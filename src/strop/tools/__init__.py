"""Tools available to a policy."""
